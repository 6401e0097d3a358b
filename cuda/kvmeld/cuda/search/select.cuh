// SPDX-License-Identifier: MIT
/// Which slots are kept: the protected, then the best of the rest, as a plan or as device lists.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/device/one_after_other.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda {

namespace detail {

/// Where a selection goes: rows of a plan, one slot each, as it is. Where `fills_gap` and one slot
/// goes of a head of one more than its target, the last is in its place, as a step of the library's
/// has it: of the others none moves.
struct evictions {
  static constexpr bool reads = true;  ///< of a slot: those of several are in flight at once

  plan_view plan;
  head_budgets limits = {};
  bool fills_gap = false;

  KVMELD_DEVICE void none(index_t h) const { plan.rows[h] = -1; }
  template <class Scalar>
  KVMELD_DEVICE void keep(const cache_view<Scalar>& cache, index_t h, index_t s,
                          index_t row) const {
    const bool stays = row != s && loses_one(cache, h);
    if (!stays || s < cache.length[h] - 1) {  // the last is put by the one that goes
      put(cache, h, s, stays ? s : row);
    }
  }
  template <class Scalar>
  KVMELD_DEVICE void evict(const cache_view<Scalar>& cache, index_t h, index_t s, index_t) const {
    if (loses_one(cache, h) && s < cache.length[h] - 1) {
      put(cache, h, cache.length[h] - 1, s);
    }
  }
  template <class Scalar>
  KVMELD_DEVICE void end(const cache_view<Scalar>& cache, index_t h, index_t rows, index_t) const {
    plan.rows[h] = rows;
    plan.begin[cache.bound(h, rows)] = rows;
  }

 private:
  template <class Scalar>
  KVMELD_DEVICE bool loses_one(const cache_view<Scalar>& cache, index_t h) const {
    return fills_gap && cache.length[h] == limits.of(h).slots + 1;
  }
  template <class Scalar>
  KVMELD_DEVICE void put(const cache_view<Scalar>& cache, index_t h, index_t s, index_t row) const {
    plan.sources[cache.slot(h, row)] = {s, 1.0F, 1.0F};
    plan.begin[cache.bound(h, row)] = row;
    plan.log_mass[cache.slot(h, row)] = cache.log_mass_of(h)[s];
  }
};

/// A block a head: the k-th highest score; then the kept slots, counted and written in
/// slot order, where of those that equal it the lower slots are kept. Reads the positions
/// four times and the rule's columns twice (heads of more than 4096 slots: five times), from L2
/// mostly; writes 20 bytes a row.
template <class Scalar, class Rule, class To>
struct select_slots {
  static constexpr index_t threads = 512, resident = 2;
  static constexpr index_t own = 4;  // consecutive slots of a thread, when writing
  using shared_memory = selection_memory<threads>;

  cache_view<Scalar> cache;
  state_view state;
  Rule rule;
  head_budgets limits;
  To to;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h];
    const budget limit = limits.of(h);
    if (!limit.reached(n) || n > cache.capacity) {
      if (thread_index() == 0) {
        to.none(h);
      }
      return;
    }
    const head_context head = context_of(cache, state, h, newest_of(shared.number, cache, h, n));
    const Rule mine = prepared(rule, limit.slots, shared.number, head, n);
    const index_t stay =
        block_total(shared.number, n, [&](index_t s) { return mine.is_protected(head, s); });
    index_t free = limit.slots - stay;
    if constexpr (requires { mine.free(stay, stay); }) {
      free = mine.free(limit.slots, stay);
    }
    const selected_order least = block_radix_select<threads>::highest(
        shared.radix, n, free < n - stay ? free : n - stay,
        [&](index_t s) { return !mine.is_protected(head, s); },
        [&](index_t s) { return mine.order(head, s); });
    write(shared, mine, head, h, n, least);
  }

 private:
  /// Kept are protected slots and those above the k-th score, and of its equals the first.
  KVMELD_DEVICE void write(shared_memory& shared, const Rule& mine, const head_context& head,
                           index_t h, index_t n, const selected_order& least) const {
    index_t sure_before = 0, equal_before = 0;
    for (index_t base = 0, turn = 0; base < n; base += threads * own, turn ^= 1) {
      unsigned sure = 0, equal = 0;  // a bit each
      unrolled<own>([&](index_t i) {
        const index_t s = base + thread_index() * own + i;
        const bool is_protected = s < n && mine.is_protected(head, s);
        const unsigned x = s < n && !is_protected ? mine.order(head, s) : 0;
        sure |= is_protected || (s < n && x > least.least) ? 1U << i : 0U;
        equal |= s < n && !is_protected && x == least.least ? 1U << i : 0U;
      });
      const auto before = block_prefix(shared.prefix, turn, count_lanes(sure), count_lanes(equal));
      index_t sure_at = sure_before + before.a, equal_at = equal_before + before.b;
      const auto put = [&](index_t i) {
        const index_t s = base + thread_index() * own + i;
        const index_t row = sure_at + (equal_at < least.equals ? equal_at : least.equals);
        const bool is_sure = (sure >> i & 1U) != 0, is_equal = (equal >> i & 1U) != 0;
        if (is_sure || (is_equal && equal_at < least.equals)) {
          to.keep(cache, h, s, row);
        } else if (s < n) {
          to.evict(cache, h, s, s - row);
        }
        sure_at += is_sure ? 1 : 0, equal_at += is_equal ? 1 : 0;
      };
      if constexpr (To::reads) {
        unrolled<own>([&](index_t i) { put(i); });
      } else {
        KVMELD_ROLLED
        for (index_t i = 0; i < own; ++i) {
          put(i);
        }
      }
      sure_before += before.all_a, equal_before += before.all_b;
    }
    if (thread_index() == 0) {
      const index_t rows =
          sure_before + (equal_before < least.equals ? equal_before : least.equals);
      to.end(cache, h, rows, n - rows);
    }
  }
};

template <class Scalar, class Rule, class To>
void select_into(const To& to, const Rule& rule, const cache_view<Scalar>& cache,
                 const state_view& state, const head_budgets& limits, stream stream) {
  static_assert(Rule::evicts, "kvmeld::cuda: expected a rule that evicts");
  launch(select_slots<Scalar, Rule, To>{cache, state, rule, limits, to}, {cache.blocks()}, stream);
}
/// ... and `then`, a kernel of a block a head too, in the same launch.
template <class Scalar, class Rule, class To, class Then>
void select_into(const To& to, const Rule& rule, const cache_view<Scalar>& cache,
                 const state_view& state, const head_budgets& limits, const Then& then,
                 stream stream) {
  using select = select_slots<Scalar, Rule, To>;
  launch(one_after_other<select, Then>{{cache, state, rule, limits, to}, then}, {cache.blocks()},
         stream);
}

}  // namespace detail

/// The plan of an eviction, for every head that holds more slots than its budget's target and at
/// least its trigger: the slots for which `rule.is_protected`, then those of the highest
/// `rule.order`, ties to the lower slot, NaN last. Other heads get `rows` −1: they stay. Equals
/// `kvmeld::evict`. One launch; protected slots beyond the target all stay. Rows are single slots.
template <class Scalar, class Rule, budgets Budgets = budget>
void select(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
            const Budgets& limits, const plan_view& plan, stream stream) {
  check(cache), check(plan, "cuda select");
  detail::check_rule(rule, cache, state, "cuda select");
  const head_budgets checked = limits;
  checked.check(cache.heads, "cuda select", [](const budget& x) {
    expects(x.slots >= 0, "cuda select: expected a target of at least 0 slots, got ", x.slots);
  });
  detail::select_into(detail::evictions{plan}, rule, cache, state, checked, stream);
}

}  // namespace kvmeld::cuda
