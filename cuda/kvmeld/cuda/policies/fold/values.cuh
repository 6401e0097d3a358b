// SPDX-License-Identifier: MIT
/// fold's fit of a plan's rows: their log-mass, and corrections of values by ridge.
#pragma once

#include "kvmeld/cuda/merge/ridge.cuh"
#include "kvmeld/cuda/policies/fold/merge_rows.cuh"
#include "kvmeld/cuda/policies/fold/probability_tiles.cuh"
#include "kvmeld/cuda/policies/fold/reference_output.cuh"
#include "kvmeld/cuda/policies/fold/reference_tiles.cuh"

namespace kvmeld::cuda::detail {

/// The rows that may change: all but pinned slots, whose corrections become 0. A block a head.
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

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = plan.rows[h];
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    const auto changes = [&](index_t r) {
      const index_t anchor = plan.sources[cache.slot(h, begin[r])].source;
      return (into[cache.slot(h, anchor)] & keep_evict_partition::fresh) != 0;
    };
    const index_t count =
        each_placed(shared.prefix, n, changes, [&](index_t r, index_t is, index_t at) {
          if (is != 0) {
            to.row[cache.slot(h, at)] = r;
          }
          to.place[cache.slot(h, r)] = is != 0 ? at : -1;
        });
    if (thread_index() == 0) {
      to.unknowns[h] = count;
    }
    for (index_t r = warp(); r < n; r += threads / 32) {
      for (index_t i = lane(); to.correction != nullptr && i < cache.dim && !changes(r); i += 32) {
        to.correction[cache.slot(h, r) * cache.dim + i] = 0;
      }
    }
  }
};

/// Are rows of 16-bit elements, aligned? Then products go on tensor cores.
template <class Scalar>
bool on_tensor_cores(const cache_view<Scalar>& cache, const chosen_rows<Scalar>& queries) {
  return sizeof(Scalar) == 2 && cache.aligned() && queries.aligned() && cache.dim % 8 == 0;
}

/// Members of the rows weighted, their log-mass fitted to `sum`. Lists the rows that may change; on
/// tensor cores the rows, in two parts each, lie in `work.rows` then. Two launches, or four.
template <class Scalar>
void fit_masses(const cache_view<Scalar>& cache, const plan_view& plan, const index_t* into,
                const chosen_rows<Scalar>& queries, const float* sum, const float* mass,
                const float* log_sum_exp, const value_scratch& work, stream stream) {
  const extent some{cache.blocks(), blocks_of(work.rows.most, 64)};
  launch(list_unknowns<Scalar>{cache, plan, into, work}, {cache.blocks()}, stream);
  if constexpr (sizeof(Scalar) == 2) {
    if (on_tensor_cores(cache, queries)) {
      launch(weigh_members<Scalar>{cache, plan, {cache, sum, mass}, work}, some, stream);
      launch(merge_rows<Scalar, true>{cache, plan, work.rows}, some, stream);
      return with_depth<128, 256>(cache.dim, [&](auto depth) {
        launch(row_masses<Scalar, decltype(depth)::value>{cache, plan, queries, log_sum_exp, work},
               some, stream);
      });
    }
  }
  launch(fit_rows<Scalar, chosen_rows<Scalar>>{cache, plan, into, queries, sum, mass, log_sum_exp},
         some, stream);
}

/// `Σ_s exp(ℓ_s − Z) v_s` for every reference query into `out [heads, group, count, dim]`.
template <class Scalar>
void outputs_of(const cache_view<Scalar>& cache, const chosen_rows<Scalar>& queries,
                const float* log_sum_exp, float* out, stream stream) {
  const index_t all = queries.count * cache.group;
  if constexpr (sizeof(Scalar) == 2) {
    if (on_tensor_cores(cache, queries)) {
      return with_depth<128, 256>(cache.dim, [&](auto depth) {
        using kernel = reference_tiles<Scalar, decltype(depth)::value>;
        launch(kernel{cache, queries, log_sum_exp, out},
               {cache.blocks(), blocks_of(all, kernel::queries_a_block),
                blocks_of(cache.dim, kernel::columns)},
               stream);
      });
    }
  }
  launch(reference_output<Scalar>{cache, queries, log_sum_exp, out},
         {cache.blocks(), blocks_of(all, query_tile::queries)}, stream);
}

/// Probabilities of the rows into the system, and what outputs lack into `work.missing`, the output
/// before. Returns the parts of a head in `work.squares`. One launch, or two.
template <class Scalar, index_t Halves>
index_t probabilities_of(const cache_view<Scalar>& cache, const plan_view& plan,
                         const chosen_rows<Scalar>& queries, const ridge_system& system,
                         const value_scratch& work, stream stream) {
  if constexpr (sizeof(Scalar) == 2) {
    if (on_tensor_cores(cache, queries)) {
      return with_depth<128, 256>(cache.dim, [&](auto depth) {
        const probability_tiles<Scalar, decltype(depth)::value> kernel{cache, queries, plan, system,
                                                                       work};
        launch(kernel,
               {cache.blocks(), blocks_of(system.depth, kernel.queries_a_block),
                blocks_of(cache.dim, kernel.columns)},
               stream);
        return kernel.parts();
      });
    }
  }
  launch(merge_rows<Scalar, false>{cache, plan, work.rows},
         {cache.blocks(), blocks_of(work.rows.most, 64)}, stream);
  launch(row_probabilities<Scalar, Halves>{cache, queries, plan, work.rows, system, work},
         {cache.blocks(), blocks_of(work.parts())}, stream);
  return work.parts();
}

/// Corrections `work.correction` of the rows' values by ridge, for which outputs on the queries
/// come closer to the full head's; behind `fit_masses`. Probabilities and outputs have as many bits
/// in the ridge as the cache's rows: a half, or two. Five launches (plain products: six), and two
/// for every 128 slots of the target.
template <class Scalar>
void fit_values(const fold_rule& rule, const cache_view<Scalar>& cache, const plan_view& plan,
                const chosen_rows<Scalar>& queries, const float* log_sum_exp,
                const value_scratch& work, stream stream) {
  constexpr index_t halves = sizeof(Scalar) == 4 ? 2 : 1;
  ridge_system system = work.system;
  system.active = {cache.active};
  outputs_of(cache, queries, log_sum_exp, work.missing, stream);
  const index_t parts =
      probabilities_of<Scalar, halves>(cache, plan, queries, system, work, stream);
  solve_ridge<halves>(
      system,
      {work.missing, work.squares, work.largest, parts, work.row, cache.capacity, work.correction},
      rule.prompt.ridge, cache.blocks(), stream);
}

}  // namespace kvmeld::cuda::detail
