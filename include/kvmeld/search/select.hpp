// SPDX-License-Identifier: MIT
/// Which slots are kept: the protected, then the best of the rest.
#pragma once

#include <algorithm>  // std::max
#include <array>
#include <bit>      // std::bit_cast
#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint32_t
#include <limits>   // std::numeric_limits
#include <span>
#include <string_view>
#include <utility>  // std::pair
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/order.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/search/rules.hpp"

namespace kvmeld::inline v0 {

/// Lists over the slots of one head, for selecting and matching. Each grows at first use; what they
/// hold between calls means nothing, but for what a search says that it writes there.
struct slot_scratch {
  detail::slot_vector<char> marks;                ///< [length] slot → kept?
  detail::slot_vector<index_t> order;             ///< slots, in some order
  detail::slot_vector<index_t> row_of;            ///< [length] slot → anchor of its row, or −1
  detail::slot_vector<index_t> places;            ///< [length] anchor → a place in `order`
  detail::slot_vector<float> numbers;             ///< whatever is computed
  detail::slot_vector<detail::keyed_slot> keyed;  ///< what is sorted

  /// Room for `capacity` slots, so that planning allocates nothing.
  void reserve(index_t capacity) {
    const auto n = as_size(capacity);
    marks.reserve(n), order.reserve(n), row_of.reserve(n), places.reserve(n), keyed.reserve(n);
  }
};

namespace search {

protection protect(const kv_head auto& head, index_t sinks, index_t recent) {
  return {sinks, recent, newest_position(head)};
}

/// Float counts exactly up to here: as many tokens as a policy's parameter may protect.
inline constexpr index_t max_tokens = 1 << 24;

/// Refuses counts of tokens (sinks, a window) below `least`, and so many that sums of them
/// overflow.
inline void expect_count(std::string_view policy, const char* what, index_t n, index_t least) {
  expects(n >= least && n <= max_tokens, policy, ": expected ", least, " to ", max_tokens, " ",
          what, ", got ", n);
}

/// The least target from `first` on that `fits`, at most `max_tokens`. Tried one by one: shares of
/// it are rounded.
template <class Fits>
index_t least_target(index_t first, Fits fits) {
  while (!fits(first) && first < max_tokens) {
    ++first;
  }
  return first;
}

/// The least target from `first` on whose `share` in [0, 1) leaves `others` slots: what the search
/// one by one finds for `share_of(share, t) <= t - others`, in a few thousand comparisons at most.
inline index_t least_target(index_t first, float share, index_t others) {
  const auto fits = [&](index_t t) { return share_of(share, t) <= t - others; };
  // While neither the product nor its half more changes its exponent, rounding is to one grid: what
  // fits once fits from there on, save that numbers of 2^23 and above take turns at a tie.
  const auto fits_soon = [&](index_t t) { return fits(t) || fits(t + 1); };
  const auto exponents = [&](index_t t) {
    const float product = share * static_cast<float>(t);
    return std::pair(std::bit_cast<std::uint32_t>(product) >> 23,
                     std::bit_cast<std::uint32_t>(product + 0.5F) >> 23);
  };
  // The first of `from` to `to` for which `holds`, which holds from there on; `to`, if none before.
  const auto first_of = [](index_t from, index_t to, auto holds) {
    while (from < to) {
      const index_t middle = from + (to - from) / 2;
      holds(middle) ? to = middle : from = middle + 1;
    }
    return from;
  };
  for (index_t tried = 0; tried < 32 && !fits(first); ++tried) {
    ++first;  // the usual shares fit at once
  }
  while (first < max_tokens && !fits(first)) {
    const auto here = exponents(first);
    const index_t next =
        first_of(first, max_tokens, [&](index_t t) { return exponents(t) > here; });
    first = first_of(first, next, fits_soon);
    first += first < next && !fits(first) ? 1 : 0;
  }
  return first;
}

/// A column of scores as what `select` ranks by.
inline auto column_score(std::span<const float> score) {
  return [score](index_t s) { return rank(score[as_size(s)]); };
}

/// Marks in `work.marks` the `target` slots to keep: those for which `is_protected(s)`, then
/// those of the highest `score(s)`; ties to the lower slot, NaN last. O(length), no sorting: the
/// lowest so far are held, and the others compared with the highest of these.
template <class Protected, class Score>
void select(index_t length, index_t target, Protected is_protected, Score score,
            slot_scratch& work) {
  work.marks.assign(as_size(length), 1);
  if (length <= target) {
    return;
  }
  const index_t evicted = length - target;
  const auto most = as_size(evicted) + std::max(as_size(evicted), std::size_t{64});
  auto& lowest = work.keyed;  // of equal scores the higher slot first
  lowest.clear();
  detail::keyed_slot bar{std::numeric_limits<std::uint64_t>::max(), 1};
  const auto drop_others = [&] {
    detail::select(lowest, evicted);
    bar = lowest[evicted];
    lowest.resize(as_size(evicted));
  };
  index_t kept = 0;  // protected ones
  for (index_t s = 0; s < length; ++s) {
    if (is_protected(s)) {
      ++kept;
    } else if (const detail::keyed_slot own{detail::ascending(score(s)), -s}; own < bar) {
      lowest.push_back(own);
      if (lowest.size() == most) {
        drop_others();
      }
    }
  }
  expects(kept <= target, "select: expected a budget of at least ", kept,
          " slots (protected), got ", target);
  if (static_cast<index_t>(lowest.size()) > evicted) {
    drop_others();
  }
  for (const detail::keyed_slot& one : lowest) {
    work.marks[-one.slot] = 0;
  }
}

/// Where a selection ends: the score of the last that is chosen, and its slot among equals.
struct kth_score {
  float score;   ///< of the last chosen
  index_t slot;  ///< ... and its slot

  /// Is a slot `s` of score `x` not chosen?
  bool below(float x, index_t s) const { return x < score || (x == score && s > slot); }
};

/// The `k`-th best of the slots for which not `is_protected(s)`, `1 ≤ k ≤` their count, by
/// `score(s)`, no NaN, ties to the lower slot: what `select` would choose last. Byte by byte of the
/// scores' bits: O(length), nothing allocated.
template <class Protected, class Score>
kth_score kth_largest(index_t length, index_t k, Protected is_protected, Score score) {
  const auto ordered = [&](index_t s) { return detail::ascending(score(s)); };
  std::uint32_t found = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    std::array<index_t, 256> count{};
    for (index_t s = 0; s < length; ++s) {
      const std::uint64_t x = ordered(s);
      if (x >> (shift + 8) == found && !is_protected(s)) {
        ++count[x >> shift & 255];
      }
    }
    std::uint32_t byte = 255;
    for (; count[byte] < k; --byte) {
      k -= count[byte];
    }
    found = found << 8 | byte;
  }
  index_t last = 0;
  while (is_protected(last) || ordered(last) != found || --k > 0) {
    ++last;
  }
  return {score(last), last};
}

/// The slot that `select` would evict first: the lowest `score(s)`, no NaN, among those for which
/// not `is_protected(s)`; the higher slot on ties; -1: none.
template <class Protected, class Score>
index_t lowest_scored(index_t length, Protected is_protected, Score score) {
  index_t least = -1;
  decltype(score(index_t{})) lowest{};
  for (index_t s = 0; s < length; ++s) {
    if (const auto x = score(s); (least < 0 || x <= lowest) && !is_protected(s)) {
      least = s, lowest = x;
    }
  }
  return least;
}

}  // namespace search
}  // namespace kvmeld::inline v0
