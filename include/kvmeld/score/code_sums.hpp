// SPDX-License-Identifier: MIT
/// Sums of values in q8_0. A weight is multiplied with the scale of a block first, then with its
/// codes: for one query a block's scale takes one product, not 32.
#pragma once

#include <algorithm>  // std::copy_n, std::min

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/score/codes.hpp"

namespace kvmeld::inline v0 {
namespace score {
inline namespace KVMELD_INSTRUCTIONS {

/// `out += Σ_s p_s v_s`, `numbers` of block `b`.
inline void sum_codes(const float* p, const code_rows& values, index_t b, index_t numbers,
                      float* out) {
  float sum[q8_0::size] = {};
  std::copy_n(out, numbers, sum);
  for (index_t s = 0; s < values.count(); ++s) {
    const q8_0& block = values[s][b];
    const float weight = p[s] * block.scale_as_float();
    for (index_t i = 0; i < q8_0::size; ++i) {
      sum[i] = detail::multiply_add(weight, static_cast<float>(block.codes[i]), sum[i]);
    }
  }
  std::copy_n(sum, numbers, out);
}

#ifdef KVMELD_AVX2_TARGET
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void load_vector(const float* x, __m256& y) {
  y = _mm256_loadu_ps(x);
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void store_vector(__m256 x, float* y) {
  _mm256_storeu_ps(y, x);
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void weigh_scale(const q8_0& block, float weight,
                                                        __m256& scales) {
  scales = _mm256_mul_ps(scales_of(block), _mm256_set1_ps(weight));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void widen_codes(const std::int8_t* codes, __m256& numbers) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  numbers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
}
#ifdef __AVX512F__
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void load_vector(const float* x, __m512& y) {
  y = _mm512_loadu_ps(x);
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void store_vector(__m512 x, float* y) {
  _mm512_storeu_ps(y, x);
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m512 multiply_add_vectors(__m512 x, __m512 y, __m512 z) {
  return _mm512_fmadd_ps(x, y, z);
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void weigh_scale(const q8_0& block, float weight,
                                                        __m512& scales) {
  const __m128 scale = _mm_cvtph_ps(_mm_set1_epi16(static_cast<short>(block.scale.x)));
  scales = _mm512_mul_ps(_mm512_broadcastss_ps(scale), _mm512_set1_ps(weight));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void widen_codes(const std::int8_t* codes, __m512& numbers) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}
#endif

/// Numbers of values at a time. For one query the longer ones are no faster.
template <index_t Q>
struct number_vector {
#ifdef __AVX512F__
  using type = __m512;
#else
  using type = __m256;
#endif
};
template <>
struct number_vector<1> {
  using type = __m256;
};

/// `out_g += Σ_s p_gs v_s` of `Q` queries, `B` whole blocks from `b` on: as `sum_codes`, to the
/// bit.
template <index_t Q, index_t B>
KVMELD_AVX2_TARGET KVMELD_NOINLINE void sum_blocks_of_codes(const float* p, std::ptrdiff_t next,
                                                            const code_rows& values, index_t blocks,
                                                            index_t b, bool fetches, float* out,
                                                            std::ptrdiff_t query) {
  using vector = typename number_vector<Q>::type;
  constexpr index_t in_each = sizeof(vector) / sizeof(float), vectors = q8_0::size / in_each;
  vector sum[Q][B * vectors];
  KVMELD_UNROLL_EARLY
  for (index_t g = 0; g < Q; ++g) {
    KVMELD_UNROLL_EARLY
    for (index_t i = 0; i < B * vectors; ++i) {
      load_vector(out + g * query + std::ptrdiff_t{i} * in_each, sum[g][i]);
    }
  }
  for (index_t s = 0; s < values.count(); ++s) {
    if (Q > 1 && fetches) {
      values.fetch(s, blocks);
    }
    KVMELD_UNROLL_EARLY
    for (index_t c = 0; c < B; ++c) {
      const q8_0& block = values[s][b + c];
      vector weight[Q], numbers;
      KVMELD_UNROLL_EARLY
      for (index_t g = 0; g < Q; ++g) {
        weigh_scale(block, p[g * next + s], weight[g]);
      }
      KVMELD_UNROLL_EARLY
      for (index_t i = 0; i < vectors; ++i) {
        widen_codes(block.codes + std::ptrdiff_t{i} * in_each, numbers);
        KVMELD_UNROLL_EARLY
        for (index_t g = 0; g < Q; ++g) {
          vector& x = sum[g][c * vectors + i];
          x = multiply_add_vectors(weight[g], numbers, x);
        }
      }
    }
  }
  KVMELD_UNROLL_EARLY
  for (index_t g = 0; g < Q; ++g) {
    KVMELD_UNROLL_EARLY
    for (index_t i = 0; i < B * vectors; ++i) {
      store_vector(sum[g][i], out + g * query + std::ptrdiff_t{i} * in_each);
    }
  }
}

/// ... of all whole blocks, as many at once as 16 sums hold.
template <index_t Q>
KVMELD_AVX2_TARGET void sum_all_codes(const float* p, std::ptrdiff_t next, const code_rows& values,
                                      index_t blocks, bool fetches, float* out,
                                      std::ptrdiff_t query) {
  constexpr index_t most = sizeof(typename number_vector<Q>::type) / Q / 8,
                    together = most > 4 ? 4 : most;
  index_t b = 0;
  for (; b + together <= blocks; b += together) {
    sum_blocks_of_codes<Q, together>(p, next, values, blocks, b, fetches && b == 0,
                                     out + std::ptrdiff_t{b} * q8_0::size, query);
  }
  for (; b < blocks; ++b) {
    sum_blocks_of_codes<Q, 1>(p, next, values, blocks, b, fetches && b == 0,
                              out + std::ptrdiff_t{b} * q8_0::size, query);
  }
}
#endif

/// `out [queries, dim] += p [queries, next] · values`, of the first `values.count()` of each row.
inline void pv_codes(const float* p, std::ptrdiff_t next, index_t queries, const code_rows& values,
                     index_t dim, float* out) {
  index_t b = 0;
#ifdef KVMELD_AVX2_TARGET
  if (runs_avx2()) {
    b = dim / q8_0::size;  // what is no whole block is left
    index_t g = 0;
    for (; g + 4 <= queries; g += 4) {
      sum_all_codes<4>(p + g * next, next, values, b, g == 0, out + std::ptrdiff_t{g} * dim, dim);
    }
    for (; g + 2 <= queries; g += 2) {
      sum_all_codes<2>(p + g * next, next, values, b, g == 0, out + std::ptrdiff_t{g} * dim, dim);
    }
    for (; g < queries; ++g) {
      sum_all_codes<1>(p + g * next, next, values, b, g == 0, out + std::ptrdiff_t{g} * dim, dim);
    }
  }
#endif
  for (; b * q8_0::size < dim; ++b) {
    const index_t begin = b * q8_0::size, numbers = std::min(dim - begin, q8_0::size);
    for (index_t g = 0; g < queries; ++g) {
      sum_codes(p + g * next, values, b, numbers, out + std::ptrdiff_t{g} * dim + begin);
    }
  }
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace kvmeld::inline v0
