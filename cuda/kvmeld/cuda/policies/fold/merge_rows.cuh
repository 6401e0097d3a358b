// SPDX-License-Identifier: MIT
/// The rows of a plan, made to be compared with the head that they are to stand for.
#pragma once

#include "kvmeld/cuda/policies/fold/value_memory.cuh"

namespace kvmeld::cuda::detail {

/// The rows of a plan, keys and values, as floats or in `Parts` of 16 bits. A warp a row, which may
/// have thousands of sources: four of them are asked for at once, and added one after the other.
template <class Scalar, bool Parts>
struct merge_rows {
  static constexpr index_t threads = 256;
  static constexpr index_t own = 4, some = 4;  // numbers of a lane, sources in flight
  struct shared_memory {};

  cache_view<Scalar> cache;
  plan_view plan;
  plan_rows to;

  /// Grid: heads, any number of blocks that share the rows.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    each_by_warp<threads>(plan.rows[h], [&](index_t r) {
      for (index_t first = 0; first < cache.dim; first += 32 * own) {
        merge(h, r, begin[r], begin[r + 1], first);
      }
    });
  }

 private:
  /// The lane's numbers of row `r`, from column `first` on.
  KVMELD_DEVICE void merge(index_t h, index_t r, index_t begin, index_t end, index_t first) const {
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    float k[own] = {}, v[own] = {};
    for (index_t base = begin; base < end; base += 32) {
      const bool is = base + lane() < end;
      const merge_source mine = plan.sources[cache.slot(h, is ? base + lane() : begin)];
      const index_t count = end - base < 32 ? end - base : 32;
      KVMELD_ROLLED
      for (index_t e0 = 0; e0 < count; e0 += some) {
        Scalar key[some][own], value[some][own];
        unrolled<some>([&](index_t e) {
          const index_t s = shuffle(mine.source, e0 + e);
          unrolled<own>([&](index_t w) {
            const index_t i = first + 32 * w + lane();
            const bool there = i < cache.dim && e0 + e < count;
            key[e][w] = there ? keys.at(s)[i] : Scalar{};
            value[e][w] = there ? values.at(s)[i] : Scalar{};
          });
        });
        unrolled<some>([&](index_t e) {
          const float a = shuffle(mine.key_weight, e0 + e), b = shuffle(mine.value_weight, e0 + e);
          KVMELD_UNROLL
          for (index_t w = 0; w < own && e0 + e < count; ++w) {
            k[w] += a * to_float(key[e][w]), v[w] += b * to_float(value[e][w]);
          }
        });
      }
    }
    unrolled<own>([&](index_t w) {
      if (const index_t i = first + 32 * w + lane(); i < cache.dim) {
        if constexpr (Parts) {
          put(to.template key_parts<Scalar>(h, r) + i, k[w]);
          put(to.template value_parts<Scalar>(h, r) + i, v[w]);
        } else {
          to.key[to.at(h, r) + i] = k[w], to.value[to.at(h, r) + i] = v[w];
        }
      }
    });
  }
  KVMELD_DEVICE void put(Scalar* to_part, float x) const {
    const Scalar high = from_float<Scalar>(x);
    to_part[0] = high, to_part[cache.dim] = from_float<Scalar>(x - to_float(high));
  }
};

}  // namespace kvmeld::cuda::detail
