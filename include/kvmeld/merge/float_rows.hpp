// SPDX-License-Identifier: MIT
/// Rows that take in others again and again, in float beside a storage of less precision.
#pragma once

#include <algorithm>  // std::equal, std::max
#include <bit>        // std::bit_cast
#include <cstddef>    // std::size_t
#include <span>

#include "kvmeld/merge/merge_rows.hpp"

namespace kvmeld::inline v0 {
namespace merge {

/// Is the stored row the rounding of `x [dim]`?
inline bool is_rounding(const float* x, row<any_scalar> stored, index_t dim) {
  constexpr index_t chunk = 64;  // whole blocks
  alignas(float) std::byte buffer[chunk * sizeof(float)];
  const row<any_scalar> rounding{buffer, std::ptrdiff_t(element_bytes(stored.type)), stored.type};
  float rounded[chunk], held[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    detail::store_row(x + begin, rounding, n);
    to_floats(rounding, n, rounded);
    to_floats(stored.from(begin), n, held);
    if (!std::equal(held, held + n, rounded)) {
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
  static constexpr std::size_t floats(index_t rows, index_t dim) {
    return as_size(rows) * (2 * as_size(dim) + header);
  }
  float_rows(std::span<float> memory, index_t rows, const head_ref& head)
      : memory_(memory.data()), rows_(rows), dim_(head.dim()), value_dim_(head.own_value_dim()) {}

  /// Before a plan's row or a removal is applied: its key and value in float. `sources`: the
  /// anchor, then the others. A slot that has no row here begins with its stored one.
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
  /// That of the slot at `position`; else one of a slot that is gone; null: all are in use.
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
