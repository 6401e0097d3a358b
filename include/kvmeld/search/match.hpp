// SPDX-License-Identifier: MIT
/// Destinations of evicted slots: the nearest of those that are kept, or leaders that slots join
/// before any is selected.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max, std::fill_n
#include <cmath>      // std::sqrt
#include <iterator>   // std::back_inserter
#include <limits>     // std::numeric_limits
#include <numeric>    // std::iota
#include <span>
#include <vector>

#include "kvmeld/score/row_products.hpp"
#include "kvmeld/score/tile_products.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {
namespace search {

/// `argmin_r ‖k_r − k_c‖` over the slots for which `candidate(r)`; ties to the lower slot, NaN
/// last; -1: none.
template <class Candidate>
index_t nearest_by_distance(const kv_head auto& head, index_t c, Candidate candidate) {
  float key[detail::row_floats], square[detail::max_tile_slots];
  to_floats(head.key(c), head.dim(), key);
  index_t best = -1;
  float least = 0;
  detail::each_tile_of_keys(head, [&](index_t first, const detail::tile& keys) {
    score::row_distances(keys, key, square);
    for (index_t i = 0; i < keys.rows(); ++i) {
      const index_t r = first + i;
      const float distance =
          std::isnan(square[i]) ? std::numeric_limits<float>::infinity() : square[i];
      if ((best < 0 || distance < least) && r != c && candidate(r)) {
        best = r, least = distance;
      }
    }
  });
  return best;
}

/// `argmax_r k_r·k_c` over slots that `c` is none of; ties to the lower slot; -1: none.
index_t nearest_by_dot(const kv_head auto& head, index_t c, std::span<const index_t> slots) {
  index_t best = -1;
  float largest = 0;
  for (const index_t r : slots) {
    const float product = score::dot(head.key(r), head.key(c), head.dim());
    if (best < 0 || product > largest || (product == largest && r < best)) {
      best = r, largest = product;
    }
  }
  return best;
}

inline float key_norm(const kv_head auto& head, index_t s) { return norm(head.key(s), head.dim()); }

/// `cos(k_a, k_b)`, from their norms; 0 when either is zero.
float cosine(const kv_head auto& head, index_t a, index_t b, float norm_a, float norm_b) {
  const float norms = norm_a * norm_b;
  return norms > 0 ? score::dot(head.key(a), head.key(b), head.dim()) / norms : 0.0F;
}

/// A slot, and the cosine of its key with the key in question.
struct near_slot {
  index_t slot = -1;  ///< -1: none
  float cosine = 0;   ///< −1 to 1
};

/// Slots compared at a time, and how many others with them.
inline constexpr index_t cosine_slots = detail::max_tile_slots, max_cosine_rows = 64;
/// Floats of the tiles that are compared, and of all that comparing works in.
inline constexpr index_t cosine_tile_floats = 16384,
                         cosine_floats = 2 * cosine_tile_floats + max_cosine_rows * cosine_slots;

/// Updates `best`, the slot most similar to `self` so far, with a tile's slots `slot [count]`; ties
/// to the lower slot. `dots [count]`: products of keys; `norm [count]`, `own`: norms of keys.
inline void take_nearest(const float* dots, const float* norm, float own, const index_t* slot,
                         index_t count, index_t self, near_slot& best) {
  // Mostly none is nearer: decided without dividing, with room for rounding.
  const float near = best.cosine * (1 - 1e-6F);
  index_t farther = 0;
  for (index_t i = 0; i < count; ++i) {
    farther += dots[i] < near * (own * norm[i]) ? 1 : 0;
  }
  if (farther == count && best.slot >= 0 && near > 0) {
    return;
  }
  alignas(detail::vector_bytes) float cosine[cosine_slots], norms[cosine_slots];
  for (index_t i = 0; i < count; ++i) {
    const float x = own * norm[i];
    norms[i] = x > 0 ? x : std::numeric_limits<float>::infinity();
  }
  for (index_t i = 0; i < count; ++i) {
    const float x = dots[i] / norms[i];
    cosine[i] = x == x ? x : 0.0F;
  }
  // At a vector's width; which slot it is takes a second pass, seldom.
  const float top = score::aligned_block(cosine, count).maxCoeff();
  if (best.slot >= 0 && top < best.cosine) {
    return;
  }
  for (index_t i = 0; i < count; ++i) {
    const bool next = best.slot < 0 || cosine[i] > best.cosine ||
                      (cosine[i] == best.cosine && slot[i] < best.slot);
    if (next && slot[i] != self) {
      best = {slot[i], cosine[i]};
    }
  }
}

/// Calls `found(s, nearest)` for each of `removed` with the slot most similar to it among those for
/// which `candidate(r)`; ties to the lower slot. Keys are read once for many of the removed, those
/// that are no candidates not at all. `scratch [cosine_floats]`.
template <class Candidate, class Found>
void nearest_by_cosine(const kv_head auto& head, std::span<const index_t> removed,
                       Candidate candidate, float* scratch, Found found) {
  constexpr index_t floats = cosine_tile_floats;
  const index_t n = head.length(), dim = head.dim(), all = static_cast<index_t>(removed.size());
  const index_t removed_at_once = std::clamp(floats / dim, index_t{1}, max_cosine_rows);
  const index_t slots_at_once = std::clamp(floats / dim, index_t{1}, cosine_slots);
  float *const key = scratch, *const buffer = key + floats, *const dots = buffer + floats;
  float norm[cosine_slots], own[max_cosine_rows];
  index_t slot[cosine_slots];
  for (index_t begin = 0; begin < all; begin += removed_at_once) {
    const index_t count = std::min(removed_at_once, all - begin);
    const index_t* const together = removed.data() + begin;
    near_slot best[max_cosine_rows];
    for (index_t c = 0; c < count; ++c) {
      to_floats(head.key(together[c]), dim, key + std::ptrdiff_t{c} * dim);
    }
    score::row_norms({key, count, dim, Eigen::OuterStride<>(dim)}, own);
    for (index_t next = 0; next < n;) {
      index_t held = 0;
      for (; next < n && held < slots_at_once; ++next) {
        if (candidate(next)) {
          slot[held++] = next;
        }
      }
      if (held == 0) {
        break;
      }
      const auto keys =
          detail::load_tile([&](index_t i) { return head.key(slot[i]); }, 0, held, dim, buffer);
      if (count == 1) {
        score::row_dots_and_norms(keys, key, dots, norm);
      } else {
        score::qk_tile(key, count, keys, dots, cosine_slots);
        score::row_norms(keys, norm);
      }
      for (index_t c = 0; c < count; ++c) {
        take_nearest(dots + std::ptrdiff_t{c} * cosine_slots, norm, own[c], slot, held, together[c],
                     best[c]);
      }
    }
    for (index_t c = 0; c < count; ++c) {
      found(together[c], best[c]);
    }
  }
}

/// Every slot that `work.marks` does not keep goes to the kept one most similar to it, of those for
/// which `takes(s)`: into `work.row_of` (a kept slot: itself; none: -1). Returns the
/// cosines `[length]`, which lie in `work.numbers`. `work.order`: the slots that are not kept.
template <class Takes>
std::span<const float> match_by_cosine(const kv_head auto& head, slot_scratch& work, Takes takes) {
  const auto n = as_size(head.length());
  auto& numbers = work.numbers;
  numbers.resize(std::max(numbers.size(), n + cosine_floats));
  const auto cosine = std::span(numbers).first(n);
  work.row_of.resize(n);
  std::iota(work.row_of.begin(), work.row_of.end(), 0);
  std::ranges::fill(cosine, 1.0F);
  work.order.clear();
  const auto kept = [&](index_t s) { return work.marks[s] != 0; };
  std::ranges::remove_copy_if(work.row_of, std::back_inserter(work.order), kept);
  nearest_by_cosine(
      head, work.order, [&](index_t s) { return kept(s) && takes(s); }, cosine.data() + n,
      [&](index_t s, near_slot to) { work.row_of[s] = to.slot, cosine[as_size(s)] = to.cosine; });
  return cosine;
}
std::span<const float> match_by_cosine(const kv_head auto& head, slot_scratch& work) {
  return match_by_cosine(head, work, [](index_t) { return true; });
}

/// The slots that `work.marks` keeps are leaders. In descending order of `rank(s)` (ties to the
/// lower slot), each other slot joins its most similar leader, if their cosine is at least
/// `similarity`, or becomes one. Only the `max_joins` most similar joins are kept (ties to the
/// lower slot); the other slots stay separate. Into `work.row_of`: slot ↦ its leader. O(length ·
/// leaders · dim), several slots at a time with all leaders so far. Allocates: it is for prompts.
template <class Rank>
void join_leaders(const kv_head auto& head, Rank rank, float similarity, index_t max_joins,
                  slot_scratch& work) {
  const index_t dim = head.dim();
  const auto n = as_size(head.length()), d = as_size(dim);
  auto& numbers = work.numbers;
  numbers.resize(std::max(numbers.size(), n));
  const auto cosine = std::span(numbers).first(n);
  auto& into = work.row_of;
  auto& order = work.order;
  into.assign(n, -1);
  order.clear();
  std::vector<float> keys, norms;  // of leaders
  std::vector<index_t> leaders;
  const auto add = [&](index_t slot, const float* key, float norm) {
    keys.insert(keys.end(), key, key + dim);
    norms.push_back(norm), leaders.push_back(slot);
  };
  // The nearest leader from the `first` one on to each of `key [count, dim]`, unless `best` is one.
  const auto find_nearest = [&](std::size_t first, const float* key, const float* own,
                                index_t count, near_slot* best) {
    float dots[max_cosine_rows * cosine_slots];
    for (; first < leaders.size(); first += std::size_t{cosine_slots}) {
      const auto held = std::min(cosine_slots, static_cast<index_t>(leaders.size() - first));
      score::qk_tile(key, count, {keys.data() + first * d, held, dim, Eigen::OuterStride<>(dim)},
                     dots, cosine_slots);
      for (index_t c = 0; c < count; ++c) {
        take_nearest(dots + std::ptrdiff_t{c} * cosine_slots, norms.data() + first, own[c],
                     leaders.data() + first, held, -1, best[c]);
      }
    }
  };
  constexpr index_t slots_at_once = 32;
  std::vector<float> key(slots_at_once * d);  // [slots_at_once, dim] those in question
  float own[slots_at_once];
  const auto load = [&](index_t i, index_t s) {
    float* const to = key.data() + std::ptrdiff_t{i} * dim;
    to_floats(head.key(s), dim, to);
    score::row_norms({to, 1, dim, Eigen::OuterStride<>(dim)}, own + i);
  };
  for (index_t s = 0; s < head.length(); ++s) {
    if (work.marks[s] != 0) {
      into[s] = s;
      load(0, s);
      add(s, key.data(), own[0]);
    } else {
      order.push_back(s);
    }
  }
  const auto descending = [](auto number) {
    return [number](index_t s) { return detail::descending(number(s)); };
  };
  detail::sort_slots(order, descending(rank), work.keyed);
  const auto others = static_cast<index_t>(order.size());
  for (index_t begin = 0; begin < others; begin += slots_at_once) {
    const index_t count = std::min(slots_at_once, others - begin);
    const std::size_t before = leaders.size();
    near_slot nearest[slots_at_once];
    for (index_t i = 0; i < count; ++i) {
      load(i, order[begin + i]);
    }
    find_nearest(0, key.data(), own, count, nearest);
    for (index_t i = 0; i < count; ++i) {
      const index_t s = order[begin + i];
      const float* const own_key = key.data() + std::ptrdiff_t{i} * dim;
      near_slot& to = nearest[i];
      find_nearest(before, own_key, own + i, 1, &to);  // leaders added since
      const bool joins = to.slot >= 0 && to.cosine >= similarity;
      into[s] = joins ? to.slot : s;
      cosine[as_size(s)] = to.cosine;
      if (!joins) {
        add(s, own_key, own[i]);
      }
    }
  }
  std::erase_if(order, [&](index_t s) { return into[s] == s; });
  if (static_cast<index_t>(order.size()) > max_joins) {
    detail::select_slots(order, max_joins, descending(column_score(cosine)), work.keyed);
    for (const index_t s : std::span(order).subspan(as_size(max_joins))) {
      into[s] = s;
    }
  }
}

}  // namespace search
}  // namespace kvmeld::inline v0
