// SPDX-License-Identifier: MIT
/// ZSMerge's plans: which slots are residual, what merges into which, and with what weight.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/zsmerge/rule.cuh"

namespace kvmeld::cuda::detail {

/// Names the residual slots of heads within the budget. Grid: heads.
template <class Scalar>
struct fix_residuals {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<index_t, threads> number;
    of_warps<candidate, threads> best;
  };

  cache_view<Scalar> cache;
  state_view state;
  zsmerge_rule rule;
  head_budgets limits;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], target = limits.of(h).slots;
    if (n > target) {
      return;
    }
    const head_context head = context_of(cache, state, h, newest_of(shared.number, cache, h, n));
    under_target(rule, target).after_compress(shared.number, shared.best, head, n);
  }
};

/// What evicted slots merge into, a block a head. While there is no residual slot at all and the
/// prompt is to be chunked: into `residual` runs in position order, the first ones a token longer,
/// each into its lowest slot. Else the best of them become the residual slots that are missing, and
/// `match` finds for every other of the lists the nearest residual slot (eq. 6).
template <class Scalar>
struct place_residuals {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
    radix_select_memory radix;
  };

  cache_view<Scalar> cache;
  state_view state;
  zsmerge_rule rule;
  head_budgets limits;
  keep_evict_partition of;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    const head_context head = context_of(cache, state, h, 0);
    const zsmerge_rule mine = prepared(rule, limits.of(h).slots, shared.sort.number, head, n);
    if (mine.missing == mine.residual && mine.chunked) {
      chunk(shared, mine, head, h);
    } else {
      seed(shared, mine, head, h, n);
    }
  }

 private:
  KVMELD_DEVICE void chunk(shared_memory& shared, const zsmerge_rule& mine,
                           const head_context& head, index_t h) const {
    const index_t count = of.removed_count[h];
    index_t most = 0;
    for (index_t e = thread_index(); e < count; e += threads) {
      const index_t p = head.position[of.removed[cache.slot(h, e)]];
      most = p > most ? p : most;
    }
    most = block_max(shared.sort.number, most);
    const index_t* const order =
        block_sort(shared.sort, of.removed + cache.slot(h, 0), of.nearest.into + cache.slot(h, 0),
                   count, static_cast<unsigned>(most),
                   [&](index_t s) { return static_cast<unsigned>(head.position[s]); });
    for (index_t c = 0, begin = 0; c < mine.residual; ++c) {
      const index_t end = begin + count / mine.residual + (c < count % mine.residual ? 1 : 0);
      index_t below = -0x7fffffff;  // of −slot
      for (index_t i = begin + thread_index(); i < end; i += threads) {
        below = -order[i] > below ? -order[i] : below;
      }
      const index_t anchor = -block_max(shared.sort.number, below);
      for (index_t i = begin + thread_index(); i < end; i += threads) {
        of.into[cache.slot(h, order[i])] =
            order[i] == anchor ? anchor | keep_evict_partition::fresh : anchor;
      }
      begin = end;
    }
    if (thread_index() == 0) {
      of.kept_count[h] = 0, of.removed_count[h] = 0;  // nothing to match
    }
  }

  KVMELD_DEVICE void seed(shared_memory& shared, const zsmerge_rule& mine, const head_context& head,
                          index_t h, index_t n) const {
    index_t* const removed = of.removed + cache.slot(h, 0);
    index_t* const into = of.into + cache.slot(h, 0);
    const index_t count = of.removed_count[h];
    const index_t missing = mine.missing > 0 ? mine.missing : 0;
    const index_t seeds = missing < count ? missing : count;
    block_radix_select<threads>::divide(
        shared.radix, shared.sort.prefix, removed, count, seeds,
        [&](index_t e) { return mine.order(head, removed[e]); },
        [&](index_t s, bool is, index_t before, index_t e) {
          if (is) {
            into[s] = s | keep_evict_partition::fresh;
          } else {
            removed[e - before] = s;
          }
        });
    sync_block();
    index_t kept = 0;
    constexpr index_t own = 8;
    for (index_t base = 0, turn = 0; base < n; base += threads * own, turn ^= 1) {
      const index_t first = base + warp() * 32 * own + lane();
      marked_places<own> is;
      unrolled<own>([&](index_t u) {
        const index_t s = first + 32 * u, to = s < n ? into[s] : -1;
        is.mark(u, to >= 0 && ((to & keep_evict_partition::fresh) != 0 || mine.counted(head, s)));
      });
      const block_prefixes before = is.of_block(shared.sort.prefix, turn);
      index_t at = kept + before.a;
      unrolled<own>([&](index_t u) {
        if ((is.lanes[u] >> lane() & 1U) != 0) {
          of.kept[cache.slot(h, at + is.below(u))] = first + 32 * u;
        }
        at += count_lanes(is.lanes[u]);
      });
      kept += before.all_a;
    }
    if (thread_index() == 0) {
      of.kept_count[h] = kept, of.removed_count[h] = count - seeds;
    }
  }
};

/// Rows of a plan of narrow rows that merge, into their anchors' slots, with the means in float. A
/// warp has a head's keys, another its values: of a prompt, a row a few thousand sources one after
/// another.
template <class Scalar>
struct merge_means {
  static constexpr index_t threads = 64;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  zsmerge_rule rule;
  plan_view plan;
  bool aligned;

  /// Grid: heads.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), rows = plan.rows[h];
    for (index_t r0 = 0; r0 < rows; r0 += 32) {
      const index_t* const begin = plan.begin + cache.bound(h, r0);
      const index_t r = r0 + lane() < rows ? lane() : 0;
      for (unsigned merging = ballot(r0 + lane() < rows && begin[r + 1] - begin[r] > 1);
           merging != 0; merging &= merging - 1U) {
        const index_t k = lowest_lane(merging);
        merge(h, plan.sources + cache.slot(h, begin[k]),
              plan.sources + cache.slot(h, begin[k + 1]));
      }
    }
  }

 private:
  KVMELD_DEVICE void merge(index_t h, const merge_source* e, const merge_source* end) const {
    using means = float_rows<Scalar>;
    const means all = rule.means(cache, context_of(cache, state, h, 0), aligned);
    const index_t anchor = e->source;
    const auto own = all.of(cache, h, cache.length[h], anchor);
    sync_block();  // both warps have found it
    const auto x = warp() == 0 ? cache.keys.of(h) : cache.values.of(h);
    const auto weight = warp() == 0 ? &merge_source::key_weight : &merge_source::value_weight;
    typename means::numbers sum;
    all.take(own, warp(), x.at(anchor), sum);
    unrolled<means::width>([&](index_t j) { sum[j] *= e->*weight; });
    add_sources<8>(x, weight, e + 1, end, lane() * means::width, cache.dim, aligned, sum);
    all.put(own, warp(), x.at(anchor), sum);
    if (thread_index() == 0) {
      all.name(own, cache.position_of(h)[anchor]);
    }
    sync_block();  // the next row's is another
  }
};

/// eq. 7: members weighted by their token counts; eq. 8: β = α ln w.
struct residual_weights {
  float alpha;

  KVMELD_DEVICE bool alone(const head_context& head, index_t s, bool was_kept) const {
    return !was_kept || head.column(zsmerge_rule::is_residual, s) != 0.0F;
  }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>&, index_t, const head_context& head,
                                merge_source* row, index_t size, float& log_mass,
                                const auto& team) const {
    float w = 0;
    for (index_t e = team.index(); e < size; e += team.size) {
      w += head.column(zsmerge_rule::count, row[e].source);
    }
    w = team.sum(w);
    for (index_t e = team.index(); e < size; e += team.size) {
      const float share = head.column(zsmerge_rule::count, row[e].source) / w;
      row[e].key_weight = share, row[e].value_weight = share;
    }
    if (team.index() == 0) {
      log_mass = alpha * logarithm(w);
    }
  }
};

}  // namespace kvmeld::cuda::detail
