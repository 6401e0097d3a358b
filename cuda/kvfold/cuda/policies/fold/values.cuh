/// fold's fit of values: corrections of clusters by ridge.
#pragma once

#include "kvfold/cuda/merge/ridge.cuh"
#include "kvfold/cuda/policies/fold/reference_output.cuh"
#include "kvfold/cuda/policies/fold/reference_tiles.cuh"

namespace kvfold::cuda::detail {

/// The rows of a plan that may change: all but pinned slots, whose corrections become 0. A block a
/// head.
template <class Scalar>
struct list_unknowns {
  static constexpr index_t threads = 512;
  struct shared_memory {
    prefix_memory<threads> prefix;
  };

  cache_view<Scalar> cache;
  plan_view plan;
  const index_t* into;  // [heads, capacity] of the partition
  value_scratch to;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = plan.rows[h];
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    const auto changes = [&](index_t r) {
      const index_t anchor = plan.sources[cache.slot(h, begin[r])].source;
      return (into[cache.slot(h, anchor)] & keep_evict_partition::fresh) != 0;
    };
    index_t count = 0;
    for (index_t base = 0, turn = 0; base < n; base += threads, turn ^= 1) {
      const index_t r = base + thread_index();
      const bool is = r < n && changes(r);
      const auto before = block_prefix(shared.prefix, turn, is ? 1 : 0, 0);
      if (is) {
        to.row[cache.slot(h, count + before.a)] = r;
      }
      if (r < n) {
        to.place[cache.slot(h, r)] = is ? count + before.a : -1;
      }
      count += before.all_a;
    }
    if (thread_index() == 0) {
      to.unknowns[h] = count;
    }
    for (index_t r = warp(); r < n; r += threads / 32) {
      for (index_t i = lane(); i < cache.dim && !changes(r); i += 32) {
        to.correction[cache.slot(h, r) * cache.dim + i] = 0;
      }
    }
  }
};

/// `Σ_s exp(ℓ_s − Z) v_s` for every reference query into `out [heads, group, count, dim]`: on
/// tensor cores where rows are of 16-bit elements, aligned.
template <class Scalar>
void outputs_of(const cache_view<Scalar>& cache, const chosen_rows<Scalar>& queries,
                const float* log_sum_exp, float* out, stream stream) {
  const auto heads = cache.blocks();
  const auto shares = [](index_t n, index_t of) {
    return static_cast<unsigned>((n + of - 1) / of);
  };
  const index_t all = queries.count * cache.group;
  if constexpr (sizeof(Scalar) == 2) {
    if (cache.aligned() && queries.aligned() && cache.dim % 8 == 0) {
      const auto multiply = [&](auto kernel) {
        launch(kernel,
               {heads, shares(all, kernel.queries_a_block), shares(cache.dim, kernel.columns)},
               stream);
      };
      if (cache.dim <= 128) {
        multiply(reference_tiles<Scalar, 128>{cache, queries, log_sum_exp, out});
      } else {
        multiply(reference_tiles<Scalar, 256>{cache, queries, log_sum_exp, out});
      }
      return;
    }
  }
  launch(reference_output<Scalar>{cache, queries, log_sum_exp, out},
         {heads, shares(all, query_tile::queries)}, stream);
}

/// Corrections `work.correction` of the rows' values by ridge, for which outputs on the queries
/// come closer to the full head's. Probabilities and outputs have as many bits in the ridge as the
/// cache's rows: a half, or two. Seven launches, and two for every 128 slots of the target.
template <class Scalar>
void fit_values(const fold_rule& rule, const cache_view<Scalar>& cache, const plan_view& plan,
                const index_t* into, const chosen_rows<Scalar>& queries, const float* log_sum_exp,
                const value_scratch& work, stream stream) {
  constexpr index_t halves = sizeof(Scalar) == 4 ? 2 : 1;
  const auto heads = cache.blocks();
  const auto shares = [](index_t n, index_t of) {
    return static_cast<unsigned>((n + of - 1) / of);
  };
  ridge_system system = work.system;
  system.active = {cache.active};
  launch(list_unknowns<Scalar>{cache, plan, into, work}, {heads}, stream);
  outputs_of(cache, queries, log_sum_exp, work.missing, stream);
  launch(merge_rows<Scalar>{cache, plan, work.rows}, {heads, shares(work.rows.most, 64)}, stream);
  launch(row_probabilities<Scalar, halves>{cache, queries, plan, work.rows, system, work},
         {heads, static_cast<unsigned>(work.parts())}, stream);
  solve_ridge<halves>(system,
                      {work.missing, work.squares, work.largest, work.parts(), work.row,
                       cache.capacity, work.correction},
                      rule.prompt.ridge, heads, stream);
}

}  // namespace kvfold::cuda::detail
