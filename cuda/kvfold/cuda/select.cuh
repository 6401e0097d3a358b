/// Who keeps a slot: the protected, then the best of the rest, as a plan on the device.
#pragma once

#include "kvfold/budget.hpp"
#include "kvfold/cuda/rules.cuh"
#include "kvfold/cuda/together.cuh"

namespace kvfold::cuda {

namespace detail {

/// A block a head. The order statistic by radix, four passes over 8 bits of every slot's order (a
/// histogram of integers in shared memory, so no order of threads can show); then the kept slots,
/// counted and written in slot order, where of those that equal the statistic the lower slots stay.
/// Reads the rule's columns and the positions, 5 times (from L2 mostly); writes 20 bytes a row.
template <class Scalar, class Rule>
struct select_slots {
  static constexpr index_t threads = 512;
  static constexpr index_t warps = threads / 32;
  static constexpr index_t own = 4;  // consecutive slots of a thread, when writing
  static constexpr index_t bins = 256;
  struct shared_memory {
    shared_array<index_t, bins> histogram;
    shared_array<index_t, 2> found;  // a digit, and how many lie above it
    of_warps<index_t, threads> number;
    shared_array<index_t, 2 * 2 * warps> counts;  // sure and equal, of two tiles in turn
  };

  cache_view<Scalar> cache;
  state_view state;
  Rule rule;
  budget limit;
  plan_view plan;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const auto h = static_cast<index_t>(block_index().x);
    const index_t n = cache.length[h];
    if (n <= limit.target || (limit.trigger > 0 && n < limit.trigger)) {
      if (thread_index() == 0) {
        plan.rows[h] = -1;
      }
      return;
    }
    index_t newest = -1;
    for (index_t s = thread_index(); s < n; s += threads) {
      const index_t p = cache.position[cache.slot(h, s)];
      newest = p > newest ? p : newest;
    }
    const head_context head = context_of(cache, state, h, block_max(shared.number, newest));
    index_t stay = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      stay += rule.stays(head, s) ? 1 : 0;
    }
    const index_t free = limit.target - block_sum(shared.number, stay);
    unsigned least = ~0U;  // of those that stay for their score
    index_t above = 0;     // are better than that
    if (free > 0) {
      least = 0;
      for (index_t shift = 24; shift >= 0; shift -= 8) {
        above += digit(shared, head, n, shift, free - above, least);
      }
    }
    write(shared, head, h, n, free > 0 ? free - above : 0, least);
  }

 private:
  /// Adds the next digit to `prefix`, the order of the `wanted`-th best of those that share it;
  /// returns how many of them lie above.
  KVFOLD_DEVICE index_t digit(shared_memory& shared, const head_context& head, index_t n,
                              index_t shift, index_t wanted, unsigned& prefix) const {
    for (index_t b = thread_index(); b < bins; b += threads) {
      shared.histogram[b] = 0;
    }
    sync_block();
    for (index_t base = 0; base < n; base += threads) {
      const index_t s = base + thread_index();
      bool counts = s < n && !rule.stays(head, s);
      const unsigned x = counts ? rule.order(head, s) : 0;
      counts = counts && (shift == 24 || x >> (shift + 8) == prefix >> (shift + 8));
      count(shared, counts, static_cast<index_t>(x >> shift & 255U));
    }
    sync_block();
    if (warp() == 0) {  // lane l: 8 bins, from the highest on
      constexpr index_t mine = bins / 32;
      index_t count[mine], sum = 0;
      KVFOLD_UNROLL
      for (index_t i = 0; i < mine; ++i) {
        sum += count[i] = shared.histogram[bins - 1 - (lane() * mine + i)];
      }
      index_t above = warp_prefix(sum);
      if (above < wanted && above + sum >= wanted) {
        index_t i = 0;
        for (; above + count[i] < wanted; ++i) {
          above += count[i];
        }
        shared.found[0] = bins - 1 - (lane() * mine + i);
        shared.found[1] = above;
      }
    }
    sync_block();
    prefix |= static_cast<unsigned>(shared.found[0]) << shift;
    const index_t above = shared.found[1];
    sync_block();
    return above;
  }

  /// Scores crowd in a few bins, of which lanes that meet there would wait for each other: the two
  /// bins of a warp's first lanes are counted at once.
  KVFOLD_DEVICE void count(shared_memory& shared, bool counts, index_t bin) const {
    unsigned left = ballot(counts);
    for (index_t round = 0; round < 2 && left != 0; ++round) {
      const index_t first = lowest_lane(left);
      const index_t its = shuffle(bin, first);
      const unsigned same = ballot(counts && bin == its) & left;
      if (lane() == first) {
        add_shared(shared.histogram, its, count_lanes(same));
      }
      left &= ~same;
    }
    if ((left >> lane() & 1U) != 0) {
      add_shared(shared.histogram, bin, 1);
    }
  }

  /// The rows: those that stay or are better than `least`, and of its equals the first `equals`.
  KVFOLD_DEVICE void write(shared_memory& shared, const head_context& head, index_t h, index_t n,
                           index_t equals, unsigned least) const {
    edge* const edges = plan.edges + cache.slot(h, 0);
    index_t* const begin = plan.begin + std::ptrdiff_t{h} * (cache.capacity + 1);
    index_t sure_before = 0, equal_before = 0;
    for (index_t base = 0, turn = 0; base < n; base += threads * own, turn ^= 1) {
      bool sure[own], equal[own];
      index_t sure_mine = 0, equal_mine = 0;
      KVFOLD_UNROLL
      for (index_t i = 0; i < own; ++i) {
        const index_t s = base + thread_index() * own + i;
        const bool stays = s < n && rule.stays(head, s);
        const unsigned x = s < n && !stays ? rule.order(head, s) : 0;
        sure[i] = stays || (s < n && x > least);
        equal[i] = s < n && !stays && x == least;
        sure_mine += sure[i] ? 1 : 0, equal_mine += equal[i] ? 1 : 0;
      }
      index_t sure_at = warp_prefix(sure_mine), equal_at = warp_prefix(equal_mine);
      if (lane() == 31) {
        shared.counts[(turn * 2 + 0) * warps + warp()] = sure_at + sure_mine;
        shared.counts[(turn * 2 + 1) * warps + warp()] = equal_at + equal_mine;
      }
      sync_block();  // one a tile: the next tile's counts lie elsewhere
      index_t sure_all = 0, equal_all = 0;
      KVFOLD_UNROLL
      for (index_t w = 0; w < warps; ++w) {
        const index_t a = shared.counts[turn * 2 * warps + w];
        const index_t b = shared.counts[(turn * 2 + 1) * warps + w];
        sure_at += w < warp() ? a : 0, equal_at += w < warp() ? b : 0;
        sure_all += a, equal_all += b;
      }
      sure_at += sure_before, equal_at += equal_before;
      KVFOLD_UNROLL
      for (index_t i = 0; i < own; ++i) {
        const index_t s = base + thread_index() * own + i;
        const index_t row = sure_at + (equal_at < equals ? equal_at : equals);
        if (sure[i] || (equal[i] && equal_at < equals)) {
          edges[row] = {s, 1.0F, 1.0F};
          begin[row] = row;
          plan.log_mass[cache.slot(h, row)] = cache.log_mass[cache.slot(h, s)];
        }
        sure_at += sure[i] ? 1 : 0, equal_at += equal[i] ? 1 : 0;
      }
      sure_before += sure_all, equal_before += equal_all;
    }
    if (thread_index() == 0) {
      const index_t rows = sure_before + (equal_before < equals ? equal_before : equals);
      plan.rows[h] = rows;
      begin[rows] = rows;
    }
  }
};

}  // namespace detail

/// The plan of an eviction, for every head that holds more than `limit.target` slots and at least
/// `limit.trigger`: the slots for which `rule.stays`, then those of the highest `rule.order`, ties
/// to the lower slot, NaN last. Other heads get `rows` −1: they stay. Equals `kvfold::evict`. One
/// launch; protected slots beyond the target all stay. Rows are single slots, as they are.
template <class Scalar, class Rule>
void select(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
            const budget& limit, const plan_view& plan, stream stream) {
  static_assert(Rule::leaves, "kvfold::cuda: a rule by which slots leave expected");
  check(cache), check(state);
  expects(limit.target >= 0, "cuda select: a target of at least 0 expected, ", limit.target,
          " came");
  expects(plan.rows != nullptr && plan.begin != nullptr && plan.edges != nullptr &&
              plan.log_mass != nullptr,
          "cuda select: rows, begin, edges and log_mass of a plan expected, null came");
  launch(detail::select_slots<Scalar, Rule>{cache, state, rule, limit, plan},
         {static_cast<unsigned>(cache.heads)}, stream);
}

}  // namespace kvfold::cuda
