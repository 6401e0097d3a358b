// SPDX-License-Identifier: MIT
/// Weights and log-mass of a plan's rows.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/merge/rows.cuh"

namespace kvmeld::cuda::detail {

/// A warp's lanes.
struct warp_team {
  static constexpr index_t size = 32, warps = 1;

  KVMELD_DEVICE static index_t index() { return lane(); }
  KVMELD_DEVICE static index_t warp() { return 0; }  ///< of the team's
  KVMELD_DEVICE static void sync() { sync_warp(); }
  template <class T>
  KVMELD_DEVICE T sum(T x) const {
    return reduce_sum(x);
  }
  template <class T>
  KVMELD_DEVICE T max(T x) const {
    return reduce_max(x);
  }
};

/// A block's threads. Sums and maxima go through double.
template <index_t Threads>
struct block_team {
  static constexpr index_t size = Threads, warps = Threads / 32;
  of_warps<double, Threads>& shared;

  KVMELD_DEVICE static index_t index() { return thread_index(); }
  KVMELD_DEVICE static index_t warp() { return kvmeld::cuda::warp(); }
  KVMELD_DEVICE static void sync() { sync_block(); }
  template <class T>
  KVMELD_DEVICE T sum(T x) const {
    return static_cast<T>(block_sum(shared, static_cast<double>(x)));
  }
  template <class T>
  KVMELD_DEVICE T max(T x) const {
    return static_cast<T>(block_max(shared, static_cast<double>(x)));
  }
};

/// `weights(cache, h, head, sources, size, log_mass, team)` has a row's sources and log-mass: by a
/// warp, or, where it takes a `block_team`, by the block for a row of very many sources. Rows of
/// one slot that was kept stay as they are, unless `weights.alone`.
template <class Scalar, class Weights>
struct weigh_rows {
  static constexpr index_t threads = 256, warps = threads / 32, resident = 2;
  static constexpr index_t very_many = 128;  // sources
  using block = block_team<threads>;
  static constexpr bool by_block =
      requires(const Weights& x, const cache_view<Scalar>& cache, const head_context& head,
               merge_source* row, float& log_mass, const block& team) {
    x(cache, 0, head, row, 0, log_mass, team);
  };
  struct shared_memory {
    of_warps<double, threads> sum;
  };

  cache_view<Scalar> cache;
  state_view state;
  keep_evict_partition from;
  plan_view plan;
  Weights weights;

  /// Grid: heads, any number of blocks that share the rows.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const head_context head = context_of(cache, state, h, 0);
    const index_t rows = plan.rows[h];
    const auto step = grid_y() * warps;
    for (index_t r0 = block_y() * warps; r0 < rows; r0 += step) {
      const index_t mine = r0 + lane();  // of the block's rows, the first lanes know one each
      const bool is = lane() < warps && mine < rows;
      const index_t first = is ? plan.begin[cache.bound(h, mine)] : 0;
      const index_t size = is ? plan.begin[cache.bound(h, mine + 1)] - first : 0;
      const unsigned many = by_block ? ballot(size > very_many) : 0;
      if (const index_t own = shuffle(size, warp()); own > 0 && (many >> warp() & 1U) == 0) {
        weigh(head, h, r0 + warp(), shuffle(first, warp()), own, warp_team{});
      }
      if constexpr (by_block) {
        for (unsigned bits = many; bits != 0; bits &= bits - 1) {
          const index_t k = lowest_lane(bits);
          weigh(head, h, r0 + k, shuffle(first, k), shuffle(size, k), block{shared.sum});
        }
      }
    }
  }

 private:
  template <class Team>
  KVMELD_DEVICE void weigh(const head_context& head, index_t h, index_t r, index_t first,
                           index_t size, const Team& team) const {
    merge_source* const row = plan.sources + cache.slot(h, first);
    const bool was_kept =
        (from.into[cache.slot(h, row[0].source)] & keep_evict_partition::fresh) == 0;
    if (size > 1 || weights.alone(head, row[0].source, was_kept)) {
      weights(cache, h, head, row, size, plan.log_mass[cache.slot(h, r)], team);
    }
  }
};

/// Weights of rows that `make_rows` has made: a warp has four of them, or one where heads are few,
/// so that every multiprocessor has some.
template <class Scalar, class Weights>
void weigh(const cache_view<Scalar>& cache, const state_view& state,
           const keep_evict_partition& from, const plan_view& plan, const Weights& weights,
           index_t target, stream stream) {
  using kernel = weigh_rows<Scalar, Weights>;
  const unsigned heads = cache.blocks();
  const index_t rows = (heads < 64 ? 1 : 4) * kernel::warps;
  launch(kernel{cache, state, from, plan, weights}, {heads, blocks_of(target, rows)}, stream);
}

/// Rows and their weights: two launches.
template <class Scalar, class Join, class Weights>
void write_rows(const cache_view<Scalar>& cache, const state_view& state,
                const keep_evict_partition& from, const plan_view& plan, const Join& join,
                const Weights& weights, index_t target, stream stream) {
  launch(make_rows<Scalar, Join>{cache, state, from, plan, join}, {cache.blocks()}, stream);
  weigh(cache, state, from, plan, weights, target, stream);
}

}  // namespace kvmeld::cuda::detail
