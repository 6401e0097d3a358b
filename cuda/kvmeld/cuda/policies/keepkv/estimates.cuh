// SPDX-License-Identifier: MIT
/// KeepKV's estimates of a prompt.
#pragma once

#include "kvmeld/cuda/policies/keepkv/rule.cuh"
#include "kvmeld/cuda/score/queries.cuh"

namespace kvmeld::cuda::detail {

/// Every slot's S takes in the queries that see it, one after another: `ln mean_g exp(scale ·
/// q_g·k)` of each by eq. 8. A thread a slot, its key in shared memory; the queries, the same for
/// all threads, come through the cache. Reads K once.
template <class Scalar, index_t Depth>
struct estimate_slots {
  using query = row_number<Scalar>;
  using shape = tile_shape<product_scalar<Scalar, query_rows<query>>, Depth>;
  static constexpr index_t threads = shape::threads;
  struct shared_memory {
    typename shape::row_array keys;
  };

  cache_view<Scalar> cache;
  state_view state;
  query_rows<query> queries;
  keepkv_rule rule;
  bool aligned;

  /// Grid: heads, tiles of slots.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t s0 = block_y() * shape::rows;
    const index_t n = cache.length[h], next_position = cache.next_position[h];
    if (s0 >= n) {
      return;
    }
    const auto keys = cache.keys.of(h);
    shape::template load<shape::rows>(
        shared.keys, [&](index_t r) { return s0 + r < n ? keys.at(s0 + r) : nullptr; },
        cache.keys.data, cache.dim, aligned);
    commit_async();
    wait_async<0>();
    sync_block();
    const index_t r = thread_index(), s = s0 + r;
    if (r >= shape::rows || s >= n) {
      return;
    }
    const head_context head = context_of(cache, state, h, 0);
    float score = head.column(keepkv_rule::log_score, s), weight_sum = 0;  // of this prompt alone
    for (index_t i = 0; i < queries.count; ++i) {
      if (head.position[s] > queries.position_of(h, i, next_position)) {
        continue;
      }
      float most = lowest_score, sum = 0;  // of the group
      for (index_t g = 0; g < cache.group; ++g) {
        float l = dot(shared, r, queries.at(h, g, i));
        cap_products(cache, l);
        l *= cache.scale;
        if (l > most) {
          sum = sum * exponential(most - l) + 1, most = l;
        } else {
          sum += exponential(l - most);
        }
      }
      rule.average(score, weight_sum, most + logarithm(sum / static_cast<float>(cache.group)));
    }
    head.column(keepkv_rule::log_score, s) = score,
                                        head.column(keepkv_rule::weight_sum, s) = weight_sum;
  }

 private:
  KVMELD_DEVICE float dot(shared_memory& shared, index_t r, const query* row) const {
    constexpr index_t many = vector_16<query>::size, width = shape::width;
    float sum = 0;
    for (index_t k = 0; k < cache.dim; k += many) {
      const auto y = load_row(row, k, cache.dim, aligned);
      unrolled<many / width>([&](index_t v) {
        const auto x = shared.keys.vector(shape::place(r, k + v * width));
        unrolled<width>([&](index_t j) { sum += to_float(x[j]) * to_float(y[v * width + j]); });
      });
    }
    return sum;
  }
};

template <class Scalar>
void estimate(const keepkv_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
              const query_rows<row_number<Scalar>>& queries, stream stream) {
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    using kernel = estimate_slots<Scalar, decltype(depth)::value>;
    launch(kernel{cache, state, queries, rule, cache.aligned() && queries.aligned()},
           {cache.blocks(), blocks_of(cache.capacity, kernel::shape::rows)}, stream);
  });
}

}  // namespace kvmeld::cuda::detail
