// SPDX-License-Identifier: MIT
/// How alike two entries are to EMS, and what they are merged into.
#pragma once

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/policies/ems/table.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// Keys as they were before RoPE, into `keys [length, dim]`; allocates nothing.
void unrotate_keys(const kv_head auto& head, std::span<float> keys) {
  const index_t n = head.length(), dim = head.dim();
  rotation turn(head.spec().rope, dim);
  for (index_t s = 0; s < n; ++s) {
    float* const key = keys.data() + std::ptrdiff_t{s} * dim;
    to_floats(head.key(s), dim, key);
    turn.by(-head.position(s));
    turn(key);
  }
}

/// The redundancy of two slots: cos(k_a, k_b) · cos(v_a, v_b), but negative when both cosines are
/// (ours: two opposites are not alike). Zero vectors: 0.
template <kv_head Head>
struct ems_redundancy {
  const Head& head;
  std::span<const float> key_norm, value_norm;  ///< [length]
  std::span<const float> keys;                  ///< [length, dim] un-rotated, or empty: as they are

  float operator()(index_t a, index_t b) const {
    const float k = cosine(keys.empty() ? score::dot(head.key(a), head.key(b), head.dim())
                                        : score::dot(turned(a), turned(b), head.dim()),
                           key_norm, a, b);
    const float v =
        cosine(score::dot(head.value(a), head.value(b), head.value_dim()), value_norm, a, b);
    return k < 0 && v < 0 ? -k * v : k * v;
  }

 private:
  row<const float> turned(index_t s) const {
    return {keys.data() + std::ptrdiff_t{s} * head.dim()};
  }
  static float cosine(float dot, std::span<const float> norm, index_t a, index_t b) {
    const float norms = norm[as_size(a)] * norm[as_size(b)];
    return norms > 0 ? dot / norms : 0.0F;
  }
};

/// Makes `best` the more redundant of the two; among equals the earlier token, wherever it lies.
void take_nearer(const kv_head auto& head, search::near_slot other, search::near_slot& best) {
  if (best.slot < 0 || other.cosine > best.cosine ||
      (other.cosine == best.cosine && head.position(other.slot) < head.position(best.slot))) {
    best = other;
  }
}

/// Eq. 5: a slot to be merged, `row_of [length]` not below 0, joins the centre most like it, or,
/// with less than `threshold`, the zero class (−1). Centres are marked and not `alone(c)`.
template <kv_head Head, class Alone>
void match_entries(const ems_redundancy<Head>& redundancy, Alone alone, float threshold,
                   slot_scratch& work) {
  const Head& head = redundancy.head;
  for (index_t s = 0; s < head.length(); ++s) {
    auto& to = work.row_of[s];
    if (work.marks[s] != 0 || to < 0) {
      continue;
    }
    search::near_slot best;
    for (index_t c = 0; c < head.length(); ++c) {
      if (work.marks[c] != 0 && !alone(c)) {
        take_nearer(head, {c, rank(redundancy(s, c))}, best);
      }
    }
    to = best.cosine >= threshold ? best.slot : -1;
  }
}

/// A row of a plan: the centre `members[0]` with those that join it, by their weights S `[length]`
/// (all equal if they sum to 0). Key: Σ S_i k_i/‖k_i‖, made as long as `norm`, the centre's own;
/// value: Σ S_i v_i / Σ S_i. `key(s)` is what k_i is read from, `key_norm(s)`, `weight(s)`; calls
/// `add(merge_source)` for each.
template <class Key, class Norm, class Weight, class Add>
void merge_entries(index_t dim, Key key, Norm key_norm, Weight weight,
                   std::span<const index_t> members, float norm, Add add) {
  double total = 0;
  for (const index_t s : members) {
    total += double{weight(s)};
  }
  const auto share = [&](index_t s) {
    return total > 0 ? double{weight(s)} / total : 1.0 / static_cast<double>(members.size());
  };
  const auto unit = [&](index_t s) {  // of the key's own direction
    const double own = double{key_norm(s)};
    return own > 0 ? share(s) / own : 0.0;
  };
  double squares = 0;
  for (index_t i = 0; i < dim; ++i) {
    double sum = 0;
    for (const index_t s : members) {
      sum += unit(s) * double{key(s)[i]};
    }
    squares += sum * sum;
  }
  // Directions that cancel, to float's precision, leave the centre's own.
  const double length = std::sqrt(squares);
  for (const index_t s : members) {
    const auto scaled = static_cast<float>(double{norm} * unit(s) / length);
    const float weight_of_key =
        length > 1e-6 ? (std::isfinite(scaled) ? scaled : 0.0F) : (s == members[0] ? 1.0F : 0.0F);
    add(merge_source{s, weight_of_key, static_cast<float>(share(s))});
  }
}

/// The entries that `work.row_of` describes as a plan's rows. With `unrotated [length, dim]` a
/// row's key is made of those and rotated to its centre's place: its weight is the centre's alone,
/// the rest a correction. `corrections [rows, dim]`: memory for these.
template <kv_head Head, class State, class Norm, class Weight>
void write_entries(const Head& head, const ems_table<State>& tokens, Norm key_norm, Weight weight,
                   std::span<const float> unrotated, std::span<float> corrections,
                   slot_scratch& work, merge_plan& out) {
  const index_t dim = head.dim();
  const auto norm = [&](std::span<const index_t> members) {
    return tokens.norm_of(head, members[0]);
  };
  if (unrotated.empty()) {
    return merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      merge_entries(
          dim, [&](index_t s) { return head.key(s); }, key_norm, weight, members, norm(members),
          [&](const merge_source& e) { out.add(e); });
      return head.log_mass(members[0]);
    });
  }
  rotation turn(head.spec().rope, dim);
  std::ranges::fill(corrections, 0.0F);
  merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
    const auto key = [&](index_t s) {
      return row<const float>{unrotated.data() + std::ptrdiff_t{s} * dim};
    };
    float* const merged = corrections.data() + std::ptrdiff_t{out.rows()} * dim;
    merge_entries(dim, key, key_norm, weight, members, norm(members), [&](const merge_source& e) {
      for (index_t i = 0; i < dim; ++i) {
        merged[i] += e.key_weight * key(e.source)[i];
      }
      out.add({e.source, e.source == members[0] ? 1.0F : 0.0F, e.value_weight});
    });
    turn.by(head.position(members[0]));
    turn(merged);
    for (index_t i = 0; i < dim; ++i) {
      merged[i] -= head.key(members[0])[i];
    }
    return head.log_mass(members[0]);
  });
  out.correct_keys(corrections.first(as_size(out.rows(), dim)), dim);
}

}  // namespace detail
}  // namespace kvmeld::inline v0
