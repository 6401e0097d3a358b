// SPDX-License-Identifier: MIT
/// fold: keys as they were before RoPE.
#pragma once

#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/rope_params.cuh"

namespace kvmeld::cuda::detail {

/// A head's keys as they were before RoPE, as rows of `sum_moments`.
template <class Scalar>
struct unrotated_keys {
  cache_view<Scalar> cache;
  rope_params turn;
  head_budgets limits;
  const index_t* more;  // [heads] 0: leverage pins nothing, and is not wanted; or null

  KVMELD_DEVICE index_t count(index_t h) const { return cache.length[h]; }
  KVMELD_DEVICE bool asks(index_t h) const {
    return limits.of(h).reached(cache.length[h]) && cache.length[h] <= cache.capacity &&
           (more == nullptr || more[h] != 0);
  }
  struct of_head {
    head_rows<Scalar> keys;
    const index_t* position;
    const rope_params& turn;
    index_t dim;

    struct loaded {
      Scalar x, y;
      index_t position;
    };
    template <index_t N>
    KVMELD_DEVICE void load(const index_t (&s)[N], index_t p, loaded (&to)[N]) const {
      const number_pair at = turn.elements(dim, p);
      Scalar* row[N];
      keys.at(s, row);
      KVMELD_UNROLL
      for (index_t u = 0; u < N; ++u) {
        to[u] = {row[u][at.i], row[u][at.j < 0 ? at.i : at.j], position[s[u]]};
      }
    }
    KVMELD_DEVICE number_pair number(const loaded& of, index_t p) const {
      number_pair x = turn.elements(dim, p);
      x.x = to_float(of.x), x.y = x.j < 0 ? 0.0F : to_float(of.y);
      return turn.turned(x, p, -of.position);
    }
  };
  KVMELD_DEVICE of_head of(index_t h) const {
    return {cache.keys.of(h), cache.position_of(h), turn, cache.dim};
  }
};

}  // namespace kvmeld::cuda::detail
