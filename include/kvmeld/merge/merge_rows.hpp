// SPDX-License-Identifier: MIT
/// Rows as weighted sums of rows, in whatever storage: those that it cannot hold, and those that
/// take in others again and again, in float next to a storage of less precision.
#pragma once

#include <algorithm>  // std::min, std::equal, std::ranges::all_of
#include <bit>        // std::bit_cast
#include <cmath>      // std::abs
#include <cstddef>    // std::byte
#include <limits>     // std::numeric_limits
#include <span>

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/merge/plan.hpp"

namespace kvmeld::inline v0 {
namespace merge {

/// `Σ weight · row + delta` in float, a chunk of elements at a time: `take(begin, n, sum)`.
template <class RowOf, class Take>
void each_chunk_of_sum(index_t dim, std::span<const merge_source> sources,
                       float merge_source::*weight, std::span<const float> delta, RowOf row_of,
                       Take take) {
  constexpr index_t chunk = 256;  // whole blocks of what is stored in blocks
  float sum[chunk], part[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    for (index_t i = 0; i < n; ++i) {
      sum[i] = delta.empty() ? 0.0F : delta[as_size(begin + i)];
    }
    for (const merge_source& e : sources) {
      to_floats(row_of(e.source).from(begin), n, part);
      const float w = e.*weight;
      for (index_t i = 0; i < n; ++i) {
        sum[i] = detail::multiply_add(w, part[i], sum[i]);
      }
    }
    take(begin, n, sum);
  }
}

/// The first source's row becomes `Σ weight · row + delta`.
template <class RowOf>
void merge_rows(index_t dim, std::span<const merge_source> sources, float merge_source::*weight,
                std::span<const float> delta, RowOf row_of) {
  float x[detail::row_floats];
  each_chunk_of_sum(
      dim, sources, weight, delta, row_of,
      [&](index_t begin, index_t n, const float* sum) { std::copy_n(sum, n, x + begin); });
  detail::store_row(x, row_of(sources.front().source), dim);
}

/// The least magnitude that a storage rounds to Inf, or holds in a block of NaN. Of keys that are
/// rotated less a mean: none whose numbers, and whose mean's, are below it is held so.
constexpr float least_overflow(storage type) {
  if (is_centred(type)) {
    constexpr float longest = 64;  // row of numbers up to 1: √4096
    return least_overflow(lies_as(type)) / (2 * longest);
  }
  switch (type) {
    case storage::f32:
      return std::numeric_limits<float>::infinity();
    case storage::f16:
      return 65520;
    case storage::bf16:
      return 0x1.ffp127F;
    case storage::q8_0:
      return 127 * 65520.0F;
    case storage::q6_0:
      return 32 * 65520.0F;
    default:
      return 8 * 65520.0F;
  }
}

/// Do the weights make a mean, or less? Its magnitude is at most the largest source's; less a mean
/// of its own that holds for the whole mean alone.
inline bool is_mean(std::span<const merge_source> sources, float merge_source::*weight,
                    bool whole) {
  float sum = 0;
  for (const merge_source& e : sources) {
    if (!(e.*weight >= 0)) {
      return false;
    }
    sum += e.*weight;
  }
  return sum <= 1 + 1e-6F && (!whole || sum >= 1 - 1e-6F);
}

/// Is the weighted sum of rows `[dim]`, and `delta`, finite in the storage of the rows?
template <class RowOf>
bool fits(storage type, index_t dim, std::span<const merge_source> sources,
          float merge_source::*weight, std::span<const float> delta, RowOf row_of) {
  if (delta.empty() && is_mean(sources, weight, is_centred(type)) &&
      std::ranges::all_of(sources,
                          [&](const merge_source& e) { return row_of(e.source).type == type; })) {
    return true;
  }
  const float limit = least_overflow(type);
  bool all = true;
  each_chunk_of_sum(dim, sources, weight, delta, row_of, [&](index_t, index_t n, const float* sum) {
    for (index_t i = 0; i < n; ++i) {
      all = all && std::abs(sum[i]) < limit;  // not NaN
    }
  });
  return all;
}

/// Are the key and the value of a row?
inline bool fits(const head_ref& head, std::span<const merge_source> sources,
                 std::span<const float> delta_k, std::span<const float> delta_v) {
  const index_t anchor = sources.front().source;
  return fits(head.key(anchor).type, head.dim(), sources, &merge_source::key_weight, delta_k,
              [&](index_t s) { return head.key(s); }) &&
         fits(head.value(anchor).type, head.own_value_dim(), sources, &merge_source::value_weight,
              delta_v, [&](index_t s) { return head.value(s); });
}

/// Leaves out of a plan what would not be finite in the storage of `head`: a row's corrections,
/// then all its sources but the anchor, which are evicted. What breaks a law is left for `check`.
inline void keep_in_range(const head_ref& head, merge_plan& plan) {
  if (!plan.lawful()) {
    return;
  }
  plan.each_changed_row([&](index_t r) {
    const auto sources = plan.row(r);
    if (!fits(head, sources, plan.key_correction(r), plan.value_correction(r))) {
      plan.clear_corrections(r);
      if (!fits(head, sources, {}, {})) {
        plan.evict_others(r, head.log_mass(sources.front().source));
      }
    }
  });
}

/// Is the stored row the rounding of `x [dim]`?
inline bool is_rounding(const float* x, row<any_scalar> stored, index_t dim) {
  alignas(float) std::byte buffer[detail::row_floats * sizeof(float)];
  row<any_scalar> rounding = stored;
  rounding.data = buffer, rounding.step = std::ptrdiff_t(element_bytes(stored.type));
  detail::store_row(x, rounding, dim);
  for (index_t i = 0; i < row_size(stored.type, dim); ++i) {
    const auto* const element = stored.data + i * stored.step;
    if (!std::equal(element, element + rounding.step, buffer + i * rounding.step)) {
      return false;
    }
  }
  return true;
}

/// A running mean that is rounded to its storage after every step stands still, once a step is less
/// than half of the storage's unit. So a policy keeps the mean in float, in its memory, and what is
/// stored is the rounding of it. Slots are known by their positions, which survive their moves.
///
/// In `floats(rows, dim)` floats, `dim` that of keys or values, whichever is larger: per row the
/// position and one, by its bits (0: a row of none), 1 if it is still to be stored, a key and a
/// value.
class float_rows {
 public:
  /// What it takes of the policy's memory, in floats.
  static constexpr std::size_t floats(index_t rows, index_t dim) {
    return as_size(rows) * (2 * as_size(dim) + header);
  }
  /// Over `memory` of `floats(rows, dim)` floats, of one head.
  float_rows(std::span<float> memory, index_t rows, const head_ref& head)
      : memory_(memory.data()), rows_(rows), dim_(head.dim()), value_dim_(head.own_value_dim()) {}

  /// Before a plan's row is applied: its key and value in float. A slot without a row here begins
  /// with its stored one.
  void merge(const kv_head auto& head, std::span<const merge_source> sources) const {
    const index_t anchor = sources.front().source;
    float* const own = row_of(head, head.position(anchor));
    if (own == nullptr) {
      return;
    }
    float* const key = own + header;
    float* const value = key + dim_;
    const bool known = position_in(own) == head.position(anchor) &&
                       is_rounding(key, head.key(anchor), dim_) &&
                       is_rounding(value, head.value(anchor), value_dim_);
    if (!known) {  // else what was stored is from elsewhere
      to_floats(head.key(anchor), dim_, key), to_floats(head.value(anchor), value_dim_, value);
    }
    const auto merged = [&](float* x, index_t dim, float merge_source::*weight, auto row_of) {
      const row<any_scalar> in_float{reinterpret_cast<std::byte*>(x), sizeof(float), storage::f32};
      merge_rows(dim, sources, weight, {},
                 [&](index_t s) { return s == anchor ? in_float : row_of(s); });
    };
    merged(key, dim_, &merge_source::key_weight, [&](index_t s) { return head.key(s); });
    merged(value, value_dim_, &merge_source::value_weight,
           [&](index_t s) { return head.value(s); });
    own[at_position] = std::bit_cast<float>(head.position(anchor) + 1);
    own[to_store] = 1;
  }
  /// Afterwards: the slots' rows are the roundings of these.
  void store(const kv_head auto& head) const {
    for (index_t i = 0; i < rows_; ++i) {
      float* const own = at(i);
      if (own[to_store] == 0) {
        continue;
      }
      own[to_store] = 0;
      if (const index_t s = slot_at(head, position_in(own)); s >= 0) {
        detail::store_row(own + header, head.key(s), dim_);
        detail::store_row(own + header + dim_, head.value(s), value_dim_);
      }
    }
  }

 private:
  enum field : std::size_t { at_position, to_store, header };

  float* at(index_t i) const { return memory_ + floats(i, std::max(dim_, value_dim_)); }
  static index_t position_in(const float* own) {
    return std::bit_cast<index_t>(own[at_position]) - 1;
  }
  static index_t slot_at(const kv_head auto& head, index_t position) {
    for (index_t s = 0; s < head.length(); ++s) {
      if (head.position(s) == position) {
        return s;
      }
    }
    return -1;
  }
  /// That of the slot at `position`; else one of a slot that was removed; null: all are in use.
  float* row_of(const kv_head auto& head, index_t position) const {
    for (index_t i = 0; i < rows_; ++i) {
      if (position_in(at(i)) == position) {
        return at(i);
      }
    }
    for (index_t i = 0; i < rows_; ++i) {
      if (slot_at(head, position_in(at(i))) < 0) {
        return at(i);
      }
    }
    return nullptr;
  }

  float* memory_;
  index_t rows_, dim_, value_dim_;
};

}  // namespace merge
}  // namespace kvmeld::inline v0
