// SPDX-License-Identifier: MIT
/// fold: the cheapest pairs by Ward's cost become one, and how rows are made of them.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/fold/queries.cuh"
#include "kvmeld/cuda/search/match.cuh"

namespace kvmeld::cuda::detail {

/// Of the slots that are not pinned (`removed`, with their cost of joining a slot of no less mass),
/// the cheapest to fold are removed, ties to the lower slot; they may join the others (`kept`).
/// A block a head.
template <class Scalar>
struct choose_cheapest {
  static constexpr index_t threads = 512, resident = 1;
  struct shared_memory {
    radix_select_memory radix;
    prefix_memory<threads> prefix;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;
  head_budgets limits;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    index_t* const list = of.removed + cache.slot(h, 0);
    const index_t count = of.removed_count[h], surplus = cache.length[h] - limits.of(h).slots;
    const auto order = [&](index_t e) {
      const bool joins = of.nearest.into[cache.slot(h, e)] >= 0;
      return ordered(joins ? of.nearest.similarity[cache.slot(h, e)] : -ward_similarity::no_cost);
    };
    const index_t freed = surplus < count ? surplus : count;
    block_radix_select<threads>::divide(shared.radix, shared.prefix, list, count, freed, order,
                                        [&](index_t s, bool goes, index_t before, index_t e) {
                                          if (goes) {
                                            list[before] = s;
                                          } else {
                                            of.kept[cache.slot(h, e - before)] = s,
                                                                      of.into[cache.slot(h, s)] = s;
                                          }
                                        });
    if (thread_index() == 0) {
      of.removed_count[h] = freed, of.kept_count[h] = count - freed;
    }
  }
};

/// Members weighted by their mass.
template <class Scalar>
struct member_weights {
  cache_view<Scalar> cache;
  const float *sum, *mass;  // [heads, capacity]

  /// Of a row of `size` sources, by a warp; what their `sum` is.
  KVMELD_DEVICE float operator()(index_t h, merge_source* row, index_t size) const {
    float weight = 0, members = 0;
    for (index_t e = lane(); e < size; e += 32) {
      weight += mass[cache.slot(h, row[e].source)];
      members += sum[cache.slot(h, row[e].source)];
    }
    weight = reduce_sum(weight), members = reduce_sum(members);
    for (index_t e = lane(); e < size; e += 32) {
      const float w = mass[cache.slot(h, row[e].source)] / weight;
      row[e].key_weight = w, row[e].value_weight = w;
    }
    return members;
  }
};

/// `kvmeld::log_ratio`
KVMELD_DEVICE inline float log_ratio(float members, float alone) {
  constexpr float least = 1e-20F, most = 1e20F;
  const float a = alone < least ? least : most < alone ? most : alone;
  return logarithm((members < least ? least : members) / a);
}

/// Members weighted by their mass; the row's log-mass fitted on the queries, so that it has in the
/// mean the mass of what it stands for: `β = ln(Σ_s sum_s / Σ_q exp(scale · q·k − Z_q))`. A warp a
/// row; a lane a query.
template <class Scalar, class Queries>
struct fit_rows {
  static constexpr index_t threads = 256;
  struct shared_memory {
    shared_array<float, threads / 32 * max_dim> key;
  };

  cache_view<Scalar> cache;
  plan_view plan;
  const index_t* into;  // [heads, capacity] of the partition: clusters of one slot are fitted too
  Queries queries;
  const float *sum, *mass;   // [heads, capacity]
  const float* log_sum_exp;  // [heads, group, count]

  /// Grid: heads, any number of blocks that share the rows.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    each_by_warp<threads>(plan.rows[h], [&](index_t r) {
      merge_source* const row = plan.sources + cache.slot(h, begin[r]);
      const bool cluster = (into[cache.slot(h, row[0].source)] & keep_evict_partition::fresh) != 0;
      if (begin[r + 1] - begin[r] > 1 || cluster) {
        fit(shared, h, row, begin[r + 1] - begin[r], plan.log_mass[cache.slot(h, r)]);
      }
    });
  }

 private:
  KVMELD_DEVICE void fit(shared_memory& shared, index_t h, merge_source* row, index_t size,
                         float& log_mass) const {
    const float members = member_weights<Scalar>{cache, sum, mass}(h, row, size);
    sync_warp();
    const auto keys = cache.keys.of(h);
    const index_t first = warp() * max_dim;
    for (index_t i = lane(); i < cache.dim; i += 32) {
      float x = 0;
      for (index_t e = 0; e < size; ++e) {
        x += row[e].key_weight * to_float(keys.at(row[e].source)[i]);
      }
      shared.key[first + i] = x;
    }
    sync_warp();
    const index_t held = queries.count_of(h);
    float alone = 0;
    for (index_t e = lane(); e < held * cache.group; e += 32) {
      const index_t g = e / held, i = e % held;
      const auto* const q = queries.at(h, g, i);
      float dot = 0;
      for (index_t j = 0; j < cache.dim; ++j) {
        dot += to_float(q[j]) * shared.key[first + j];
      }
      alone += exponential(cache.scale * dot -
                           log_sum_exp[(std::ptrdiff_t{h} * cache.group + g) * queries.count + i]);
    }
    alone = held == 0 ? 1.0F : reduce_sum(alone);
    if (lane() == 0) {
      log_mass = log_ratio(members, alone);
    }
    sync_warp();  // the key is used up
  }
};

}  // namespace kvmeld::cuda::detail
