/// Farthest-first seeds of clusters.
#pragma once

#include "kvfold/cuda/memory/head_budgets.cuh"
#include "kvfold/cuda/search/clusters.cuh"

namespace kvfold::cuda::detail {

/// Farthest-first (Gonzalez 1985), weighted: repeatedly the slot with the largest `weight · D²` to
/// the nearest of the pinned and the seeds so far, ties to the lower slot. Lazily, as on the CPU: a
/// distance only falls, so what it was is a bound, and a slot is compared with the seeds since only
/// when its bound comes first: first among those of a warp here, for all warps compare at once. A
/// block a head. The seeds get `fresh` in `into`, and then the list of those kept, ascending.
template <class Scalar>
struct farthest_first {
  static constexpr index_t threads = 512;
  static constexpr index_t own = max_dim / 32;  // elements of a row in a lane
  struct shared_memory {
    of_warps<candidate, threads> best;
    of_warps<float, threads> sum;
    shared_array<index_t, 2 * threads / 32> fresh;  // of two turns
    shared_array<float, max_dim> key;
    prefix_memory<threads> prefix;
  };

  cache_view<Scalar> cache;
  cluster_space space;
  keep_evict_partition of;
  centre_rows seeds;
  float* distance;          // [heads, capacity] by place in the list of removed slots
  index_t* seeds_compared;  // [heads, capacity] how many; −1: it is a seed
  head_budgets limits;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t* const list = of.removed + cache.slot(h, 0);
    const index_t size = of.removed_count[h];
    const index_t count = limits.of(h).target - of.kept_count[h];
    for (index_t e = thread_index(); e < size; e += threads) {
      const bool any = of.nearest.into[cache.slot(h, e)] >= 0;
      const float d =
          space.square[cache.slot(h, list[e])] - 2 * of.nearest.similarity[cache.slot(h, e)];
      distance[cache.slot(h, e)] = !any ? ward_similarity::no_cost : d > 0 ? d : 0.0F;
      seeds_compared[cache.slot(h, e)] = 0;
    }
    sync_block();
    const index_t share = (size + threads / 32 - 1) / (threads / 32);
    candidate best = farthest(h, list, size, share);
    for (index_t now = 0, turn = 0; now < count;) {
      const bool known = best != 0 && seeds_compared[cache.slot(h, most_slot(best))] == now;
      if (lane() == 0) {
        shared.fresh[turn * (threads / 32) + warp()] = known ? 1 : 0;
      }
      const candidate top = block_max(shared.best, best);
      if (top == 0) {
        break;
      }
      const index_t e = most_slot(top), its = e / share;
      const bool chosen = shared.fresh[turn * (threads / 32) + its] != 0;
      turn ^= 1;
      if (!chosen) {
        if (best != 0 && !known) {
          compare(h, list, most_slot(best), now);
          best = farthest(h, list, size, share);
        }
        continue;
      }
      if (warp() == its) {
        if (lane() == 0) {
          seeds_compared[cache.slot(h, e)] = -1;
        }
        sync_warp();
        best = farthest(h, list, size, share);
      }
      seed(shared, h, list[e], now);
      ++now;
    }
    sync_block();
    keep(shared, h);
  }

 private:
  /// The warp's first by what is known.
  KVFOLD_DEVICE candidate farthest(index_t h, const index_t* list, index_t size,
                                   index_t share) const {
    candidate best = 0;
    const index_t begin = warp() * share, end = begin + share < size ? begin + share : size;
    for (index_t e = begin + lane(); e < end; e += 32) {
      if (seeds_compared[cache.slot(h, e)] >= 0) {
        const float gain = space.weight[cache.slot(h, list[e])] * distance[cache.slot(h, e)];
        const candidate c = most_candidate(ordered(gain), e);
        best = c > best ? c : best;
      }
    }
    return reduce_max(best);
  }

  /// One slot with the seeds that it was not compared with, by a warp.
  KVFOLD_DEVICE void compare(index_t h, const index_t* list, index_t e, index_t now) const {
    const Scalar* const k = cache.keys.of(h).at(list[e]);
    const Scalar* const v = cache.values.of(h).at(list[e]);
    float key[own], value[own];
    KVFOLD_UNROLL
    for (index_t u = 0; u < own; ++u) {
      const index_t i = u * 32 + lane();
      key[u] = i < cache.dim ? to_float(k[i]) : 0.0F;
      value[u] = i < cache.dim ? to_float(v[i]) : 0.0F;
    }
    const float square = space.square[cache.slot(h, list[e])];
    float least = distance[cache.slot(h, e)];
    for (index_t j = seeds_compared[cache.slot(h, e)]; j < now; ++j) {
      const float* const y = seeds.key + seeds.at(h, j);
      const float* const z = seeds.value + seeds.at(h, j);
      float dot = 0;
      KVFOLD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t i = u * 32 + lane();
        dot += i < cache.dim ? key[u] * y[i] + value[u] * z[i] : 0.0F;
      }
      dot = reduce_sum(dot);
      const float d = square - 2 * (dot - seeds.half[std::ptrdiff_t{h} * seeds.most + j]);
      least = d < least ? (d > 0 ? d : 0.0F) : least;
    }
    sync_warp();  // all have read
    if (lane() == 0) {
      distance[cache.slot(h, e)] = least, seeds_compared[cache.slot(h, e)] = now;
    }
    sync_warp();
  }

  /// Slot `s` as seed `now`, by the block.
  KVFOLD_DEVICE void seed(shared_memory& shared, index_t h, index_t s, index_t now) const {
    const index_t i = thread_index();
    const Scalar* const k = cache.keys.of(h).at(s);
    const Scalar* const v = cache.values.of(h).at(s);
    if (i < cache.dim) {
      shared.key[i] = to_float(k[i]);
    }
    sync_block();
    float half = 0;
    if (i < cache.dim) {
      const float* const metric = space.metric + std::ptrdiff_t{h} * cache.dim * cache.dim;
      float y = 0;
      for (index_t j = 0; j < cache.dim; ++j) {
        y += metric[std::ptrdiff_t{j} * cache.dim + i] * shared.key[j];
      }
      const float x = to_float(v[i]);
      seeds.key[seeds.at(h, now) + i] = y;
      seeds.value[seeds.at(h, now) + i] = x * space.inverse[h];
      half = 0.5F * (y * shared.key[i] + x * x * space.inverse[h]);
    }
    half = block_sum(shared.sum, half);
    if (i == 0) {
      seeds.half[std::ptrdiff_t{h} * seeds.most + now] = half;
      of.into[cache.slot(h, s)] = s | keep_evict_partition::fresh;
    }
  }

  KVFOLD_DEVICE void keep(shared_memory& shared, index_t h) const {
    const index_t n = cache.length[h];
    index_t kept = 0;
    for (index_t base = 0, turn = 0; base < n; base += threads, turn ^= 1) {
      const index_t s = base + thread_index();
      const bool is = s < n && of.into[cache.slot(h, s)] == (s | keep_evict_partition::fresh);
      const auto before = block_prefix(shared.prefix, turn, is ? 1 : 0, 0);
      if (is) {
        of.kept[cache.slot(h, kept + before.a)] = s;
      }
      kept += before.all_a;
    }
    if (thread_index() == 0) {
      of.kept_count[h] = kept;
    }
  }
};

}  // namespace kvfold::cuda::detail
