// SPDX-License-Identifier: MIT
/// Attention over rows in blocks (q8_0, q6_0, q4_0), and the instructions for it. They are AVX2's:
/// in a program for every x86-64 on Linux the processor is queried when it runs. Elsewhere loops
/// compute the same bits.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::clamp, std::fill, std::min, std::copy_n, std::fill_n, std::max, std::lower_bound
#include <bit>     // std::bit_cast
#include <cmath>   // std::isfinite
#include <limits>  // std::numeric_limits
#include <span>
#include <type_traits>  // std::integral_constant
#include <utility>      // std::integer_sequence

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/view.hpp"

#if defined(__CUDACC__) || (KVMELD_HAS_FMA && !defined(__FMA__))
// Loops: nvcc takes no vectors, and FMA4 is no part of AVX2.
#elif defined(__GNUC__) && defined(__AVX2__) && defined(__F16C__)
#define KVMELD_AVX2_TARGET
#include <immintrin.h>
#elif defined(__GNUC__) && defined(__x86_64__) && defined(__linux__)
#define KVMELD_AVX2_TARGET [[gnu::target("avx2,f16c")]]
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvmeld::inline v0 {
namespace score {

/// Slots swept at a time.
inline constexpr index_t tile_slots = 128;

inline namespace KVMELD_INSTRUCTIONS {

/// Calls `use<Q>(first)` for all of so many queries, `Q` at a time, at most `most`: in one sweep
/// over the rows, whose codes are then widened once, where models have such groups.
template <index_t most, class Use>
EIGEN_ALWAYS_INLINE void in_groups(index_t queries, const Use& use) {
  index_t g = 0;
  const auto take = [&]<index_t Q>(std::integral_constant<index_t, Q>) {
    if constexpr (Q <= most) {
      for (; g + Q <= queries; g += Q) {
        use.template operator()<Q>(g);
      }
    }
  };
  const auto take_all = [&]<index_t... Q>(std::integer_sequence<index_t, Q...>) {
    (take(std::integral_constant<index_t, Q>()), ...);
  };
  take_all(std::integer_sequence<index_t, 8, 7, 6, 4, 3, 2, 1>());
}

/// Has the processor that runs this the instructions of `KVMELD_AVX2_TARGET`?
inline bool runs_avx2() {
#if defined(__AVX2__) && defined(__F16C__) && defined(KVMELD_AVX2_TARGET)
  return true;
#elif defined(KVMELD_AVX2_TARGET)
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx2") != 0 && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
           (c & bit_F16C) != 0;
  }();
  return has;
#else
  return false;
#endif
}

/// The slots of a head whose rows are among the newest, ascending.
class newest_slots {
 public:
  newest_slots() = default;
  /// None where no rows are in half.
  explicit newest_slots(const head_ref& head) {
    if (head.type().newest > 0) {
      const index_t *const position = head.metadata().position, n = head.length(),
                           rounded = head.rounded();
      for (index_t s = 0; s < n; ++s) {
        slots_[count_] = s;
        const bool in_half = position[s] >= rounded || position[s] < first_in_half;
        count_ += in_half && count_ < most ? 1 : 0;
      }
    }
  }
  /// Those of `count` slots from `first` on.
  std::span<const index_t> among(index_t first, index_t count) const {
    const index_t* const end = slots_ + count_;
    const index_t* const from = std::lower_bound(slots_, end, first);
    return {from, std::lower_bound(from, end, first + count)};
  }

  static constexpr index_t most = rows_in_half(64);  ///< that a cache has

 private:
  index_t count_ = 0;
  index_t slots_[most + 1];
};

/// Calls `use` with a block of `type`, which is in blocks.
EIGEN_ALWAYS_INLINE void with_block(storage type, const auto& use) {
  if (lies_as(type) == storage::q8_0) {
    use(q8_0{});
  } else if (lies_as(type) == storage::q6_0) {
    use(q6_0{});
  } else {
    use(q4_0{});
  }
}

/// Where the rows of a tile begin, in one page or several, and those that follow it. Of the newest,
/// which lie elsewhere in half, zeros: `qk_newest` and `pv_newest` add them.
template <block_scalar Block>
class code_rows {
 public:
  /// Of `count` slots from `first` on; `from(s)`: those of a page from slot `s` on.
  template <class From>
  code_rows(const head_ref& head, index_t first, index_t count, From from,
            std::span<const index_t> newest = {})
      : count_(count) {
    const index_t known = std::min(count + ahead, head.length() - first);
    const Block* last = zeros;
    for (index_t i = 0; i < known;) {
      const head_rows page = from(first + i);
      const index_t end = std::min(known, i + head.rows_from(first + i));
      for (index_t r = 0; i < end; ++i, ++r) {
        rows_[i] = last = reinterpret_cast<const Block*>(page.data + r * page.row);
      }
    }
    std::fill(rows_ + known, rows_ + count + ahead, last);
    for (const index_t s : newest) {
      rows_[s - first] = zeros;
    }
  }

  index_t count() const { return count_; }                       ///< slots
  const Block* operator[](index_t s) const { return rows_[s]; }  ///< of slot `first + s`
  /// Fetches `blocks` of the row that is read some rows after `s`. For several queries: with one,
  /// rows are read so fast, and in order, that processors fetch them better by themselves.
  EIGEN_ALWAYS_INLINE void fetch(index_t s, index_t blocks) const {
    constexpr std::ptrdiff_t line = 64;
    const auto* const row = reinterpret_cast<const std::byte*>(rows_[s + ahead]);
    const std::ptrdiff_t bytes = blocks * std::ptrdiff_t{sizeof(Block)};
    std::ptrdiff_t i = 0;
    do {  // the last line is mostly the next row's first
      Eigen::internal::prefetch(row + i);
      i += line;
    } while (i < bytes - line);
  }

 private:
  static constexpr index_t ahead = 32;
  inline static const Block zeros[detail::row_floats / Block::size] = {};

  const Block* rows_[tile_slots + ahead];
  index_t count_;
};

#ifdef KVMELD_AVX2_TARGET
/// `x · y + z`, rounded as by `detail::multiply_add`.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256 multiply_add_vectors(__m256 x, __m256 y, __m256 z) {
#if KVMELD_HAS_FMA
  return _mm256_fmadd_ps(x, y, z);
#else
  return _mm256_add_ps(_mm256_mul_ps(x, y), z);
#endif
}

/// The scale of a block, eight times.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256 scales_of(const block_scalar auto& block) {
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(block.scale.x)));
}
#endif

}  // namespace KVMELD_INSTRUCTIONS

/// Query heads per sweep at most; a larger group sweeps again.
inline constexpr index_t sweep_group = 16;

/// Queries as 16-bit codes times a power of two, one each: whole numbers below 32,768 are exact,
/// and what shares a power of two with them. Those of 8 bits would lose 256 times as much.
class rounded_queries {
 public:
  /// How many of `dim` numbers fit, 1 at least: the query heads of a sweep.
  static index_t most(index_t dim) {
    return std::min(detail::row_floats / padded(dim), sweep_group);
  }

  /// Of `q [queries, dim]`.
  void assign(const float* q, index_t queries, index_t dim) {
    queries_ = queries, row_ = padded(dim);
    for (index_t g = 0; g < queries; ++g) {
      std::int16_t* const codes = codes_ + std::ptrdiff_t{g} * row_;
      scales_[g] = round(q + std::ptrdiff_t{g} * dim, dim, codes);
      std::fill_n(codes + dim, row_ - dim, std::int16_t{0});
    }
  }

  index_t queries() const { return queries_; }          ///< of the last `assign`
  index_t blocks() const { return row_ / q8_0::size; }  ///< of a query's row
  /// Of query `g`, from block `b` on.
  const std::int16_t* codes(index_t g, index_t b) const {
    return codes_ + std::ptrdiff_t{g} * row_ + std::ptrdiff_t{b} * q8_0::size;
  }
  float scale(index_t g) const { return scales_[g]; }  ///< of query `g`'s codes

 private:
  static index_t padded(index_t dim) { return row_size<q8_0>(dim) * q8_0::size; }

  /// Returns the scale, the least power of two with which no code exceeds 32,767: a number is off
  /// by half of it at most. With NaN or Inf the scale is NaN.
  static float round(const float* x, index_t n, std::int16_t* codes) {
    constexpr float least = 0x1p-100F;  // whose inverse is finite
    constexpr std::uint32_t exponent = 0x7f800000U;
    const float most = std::max(detail::largest_magnitude(x, n), least);
    if (!std::isfinite(most)) {
      std::fill_n(codes, n, std::int16_t{0});
      return std::numeric_limits<float>::quiet_NaN();
    }
    float scale = std::bit_cast<float>(std::bit_cast<std::uint32_t>(most) & exponent) * 0x1p-14F;
    scale *= most / scale < 32767.5F ? 1 : 2;
    for (index_t i = 0; i < n; ++i) {
      const float code = x[i] / scale;
      codes[i] = static_cast<std::int16_t>(code + (code < 0 ? -0.5F : 0.5F));
    }
    return scale;
  }

  alignas(detail::vector_bytes) std::int16_t codes_[detail::row_floats];
  float scales_[sweep_group];
  index_t queries_ = 0, row_ = 0;
};

inline namespace KVMELD_INSTRUCTIONS {

/// `q · k / scale`. The products of a block are summed in integers of 32 bits, numbers `i` of it in
/// the `i / 2 % 8`th of eight sums.
template <block_scalar Block>
float dot_codes(const std::int16_t* q, const Block* k, index_t blocks) {
  float sum[8] = {};
  for (index_t b = 0; b < blocks; ++b, q += Block::size) {
    const float scale = k[b].scale_as_float();
    std::int32_t products[Block::size];  // of less than 2²²
    for (index_t i = 0; i < Block::size; ++i) {
      products[i] = std::int32_t{q[i]} * k[b].code(i);
    }
    for (index_t i = 0; i < 8; ++i) {
      const std::int32_t* const x = products + std::ptrdiff_t{2} * i;
      sum[i] = detail::multiply_add(scale, static_cast<float>(x[0] + x[1] + x[16] + x[17]), sum[i]);
    }
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

#ifdef KVMELD_AVX2_TARGET
/// Codes of 4 bits as numbers of 8: those in the lower halves of `pairs`, or in the upper ones.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i lower_or_upper(__m128i pairs, bool upper) {
  return _mm_and_si128(upper ? _mm_srli_epi16(pairs, 4) : pairs, _mm_set1_epi8(15));
}
/// ... with the upper 2 bits of codes of 6, of which every fourth pair of bits of a byte is used:
/// the first of the `i`-th eight codes, and those of the eight after them.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i with_upper(__m128i codes, const q6_0& block, int i) {
  const __m128i all = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block.upper)),
                first = _mm_srli_epi16(all, 2 * i), next = _mm_srli_epi16(all, 2 * i + 2);
  const __m128i bits = _mm_and_si128(_mm_unpacklo_epi64(first, next), _mm_set1_epi8(3));
  return _mm_or_si128(codes, _mm_slli_epi16(bits, 4));
}
/// The first 16 codes of a block, or the last.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i half_of_codes(const q8_0& block, bool last) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block.codes + (last ? 16 : 0)));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i half_of_codes(const q4_0& block, bool last) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block.codes));
  return _mm_sub_epi8(lower_or_upper(pairs, last), _mm_set1_epi8(8));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i half_of_codes(const q6_0& block, bool last) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block.codes));
  return _mm_sub_epi8(with_upper(lower_or_upper(pairs, last), block, last ? 2 : 0),
                      _mm_set1_epi8(32));
}

/// The 32 products of a block, in eight sums.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256i products_of(const block_scalar auto& block,
                                                           const std::int16_t* q) {
  const auto* const x = reinterpret_cast<const __m256i*>(q);
  const __m256i first = _mm256_cvtepi8_epi16(half_of_codes(block, false)),
                last = _mm256_cvtepi8_epi16(half_of_codes(block, true));
  return _mm256_add_epi32(_mm256_madd_epi16(first, _mm256_load_si256(x)),
                          _mm256_madd_epi16(last, _mm256_load_si256(x + 1)));
}

/// The sum of each of eight packets.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256 sums_of(const __m256* x) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/// `dots[g][r] = q_g · k_r / scale_g` of `Q` queries from `first` on and `R` keys from `s` on: as
/// `dot_codes`, to the bit. One key is read after the other, as memory is fetched best.
template <index_t Q, index_t R, class Block>
KVMELD_AVX2_TARGET KVMELD_NOINLINE void dot_block_of_codes(const rounded_queries& q, index_t first,
                                                           const code_rows<Block>& keys, index_t s,
                                                           float* dots, std::ptrdiff_t next) {
  __m256 sum[8];
  KVMELD_UNROLL_EARLY
  for (index_t i = 0; i < 8; ++i) {
    sum[i] = _mm256_setzero_ps();
  }
  KVMELD_UNROLL_EARLY
  for (index_t r = 0; r < R; ++r) {
    const Block* const key = keys[s + r];
    if (Q > 1 && first == 0) {
      keys.fetch(s + r, q.blocks());
    }
    for (index_t b = 0; b < q.blocks(); ++b) {
      const __m256 scale = scales_of(key[b]);
      KVMELD_UNROLL_EARLY
      for (index_t g = 0; g < Q; ++g) {
        const __m256 whole = _mm256_cvtepi32_ps(products_of(key[b], q.codes(first + g, b)));
        sum[g * R + r] = multiply_add_vectors(scale, whole, sum[g * R + r]);
      }
    }
  }
  float sums[8];
  _mm256_storeu_ps(sums, sums_of(sum));
  KVMELD_UNROLL_EARLY
  for (index_t g = 0; g < Q; ++g) {
    std::copy_n(sums + std::ptrdiff_t{g} * R, R, dots + g * next);
  }
}

/// ... of all keys.
template <index_t Q, class Block>
KVMELD_AVX2_TARGET void dot_all_codes(const rounded_queries& q, index_t first,
                                      const code_rows<Block>& keys, float* dots,
                                      std::ptrdiff_t next) {
  constexpr index_t together = 8 / Q;
  index_t s = 0;
  for (; s + together <= keys.count(); s += together) {
    dot_block_of_codes<Q, together>(q, first, keys, s, dots + s, next);
  }
  for (; s < keys.count(); ++s) {
    dot_block_of_codes<Q, 1>(q, first, keys, s, dots + s, next);
  }
}
#endif

/// `dots [queries, next] = q [queries, dim] · keysᵀ`, the first `keys.count()` of each row.
template <class Block>
void qk_codes(const rounded_queries& q, const code_rows<Block>& keys, float* dots,
              std::ptrdiff_t next) {
  index_t g = 0;
#ifdef KVMELD_AVX2_TARGET
  if (runs_avx2()) {
    g = q.queries();
    in_groups<8>(q.queries(), [&]<index_t Q>(index_t first) {
      dot_all_codes<Q>(q, first, keys, dots + first * next, next);
    });
  }
#endif
  for (; g < q.queries(); ++g) {
    for (index_t s = 0; s < keys.count(); ++s) {
      dots[g * next + s] = dot_codes(q.codes(g, 0), keys[s], q.blocks());
    }
  }
  for (g = 0; g < q.queries(); ++g) {
    Eigen::Map<Eigen::ArrayXf>(dots + g * next, keys.count()) *= q.scale(g);
  }
}

/// `out += Σ_s p_s v_s`, `numbers` of block `b`.
template <class Block>
void sum_codes(const float* p, const code_rows<Block>& values, index_t b, index_t numbers,
               float* out) {
  float sum[Block::size] = {};
  std::copy_n(out, numbers, sum);
  for (index_t s = 0; s < values.count(); ++s) {
    const Block& block = values[s][b];
    const float weight = p[s] * block.scale_as_float();
    for (index_t i = 0; i < Block::size; ++i) {
      sum[i] = detail::multiply_add(weight, static_cast<float>(block.code(i)), sum[i]);
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
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void weigh_scale(const block_scalar auto& block,
                                                        float weight, __m256& scales) {
  scales = _mm256_mul_ps(scales_of(block), _mm256_set1_ps(weight));
}
/// The eight codes from number `8 i` on, 8 bits each.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i eight_codes(const q8_0& block, index_t i) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block.codes + std::ptrdiff_t{8} * i));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i eight_codes(const q4_0& block, index_t i) {
  const auto* const pairs = block.codes + std::ptrdiff_t{8} * (i % 2);
  return _mm_sub_epi8(
      lower_or_upper(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(pairs)), i >= 2),
      _mm_set1_epi8(8));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m128i eight_codes(const q6_0& block, index_t i) {
  const auto* const pairs = block.codes + std::ptrdiff_t{8} * (i % 2);
  return _mm_sub_epi8(
      with_upper(lower_or_upper(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(pairs)), i >= 2),
                 block, i),
      _mm_set1_epi8(32));
}
/// The `i`-th vector of a block's codes.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void widen_codes(const block_scalar auto& block, index_t i,
                                                        __m256& numbers) {
  numbers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_codes(block, i)));
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
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void weigh_scale(const block_scalar auto& block,
                                                        float weight, __m512& scales) {
  const __m128 scale = _mm_cvtph_ps(_mm_set1_epi16(static_cast<short>(block.scale.x)));
  scales = _mm512_mul_ps(_mm512_broadcastss_ps(scale), _mm512_set1_ps(weight));
}
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE void widen_codes(const block_scalar auto& block, index_t i,
                                                        __m512& numbers) {
  numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half_of_codes(block, i == 1)));
}
#endif

/// Queries whose sums of a block stay in registers.
#ifdef __AVX512F__
inline constexpr index_t most_summed = 8;
#else
inline constexpr index_t most_summed = 4;
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
template <index_t Q, index_t B, class Block>
KVMELD_AVX2_TARGET KVMELD_NOINLINE void sum_blocks_of_codes(const float* p, std::ptrdiff_t next,
                                                            const code_rows<Block>& values,
                                                            index_t blocks, index_t b, bool fetches,
                                                            float* out, std::ptrdiff_t query) {
  using vector = typename number_vector<Q>::type;
  constexpr index_t in_each = sizeof(vector) / sizeof(float), vectors = Block::size / in_each;
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
      const Block& block = values[s][b + c];
      vector weight[Q], numbers;
      KVMELD_UNROLL_EARLY
      for (index_t g = 0; g < Q; ++g) {
        weigh_scale(block, p[g * next + s], weight[g]);
      }
      KVMELD_UNROLL_EARLY
      for (index_t i = 0; i < vectors; ++i) {
        widen_codes(block, i, numbers);
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
template <index_t Q, class Block>
KVMELD_AVX2_TARGET void sum_all_codes(const float* p, std::ptrdiff_t next,
                                      const code_rows<Block>& values, index_t blocks, bool fetches,
                                      float* out, std::ptrdiff_t query) {
  constexpr auto together =
      std::clamp<index_t>(sizeof(typename number_vector<Q>::type) / Q / 8, 1, 4);
  index_t b = 0;
  for (; b + together <= blocks; b += together) {
    sum_blocks_of_codes<Q, together>(p, next, values, blocks, b, fetches && b == 0,
                                     out + std::ptrdiff_t{b} * Block::size, query);
  }
  for (; b < blocks; ++b) {
    sum_blocks_of_codes<Q, 1>(p, next, values, blocks, b, fetches && b == 0,
                              out + std::ptrdiff_t{b} * Block::size, query);
  }
}
#endif

/// `out [queries, dim] += p [queries, next] · values`, of the first `values.count()` of each row.
template <class Block>
void pv_codes(const float* p, std::ptrdiff_t next, index_t queries, const code_rows<Block>& values,
              index_t dim, float* out) {
  index_t b = 0;
#ifdef KVMELD_AVX2_TARGET
  if (runs_avx2()) {
    b = dim / Block::size;  // what is no whole block is left
    in_groups<most_summed>(queries, [&]<index_t Q>(index_t g) {
      sum_all_codes<Q>(p + g * next, next, values, b, g == 0, out + std::ptrdiff_t{g} * dim, dim);
    });
  }
#endif
  for (; b * Block::size < dim; ++b) {
    const index_t begin = b * Block::size, numbers = std::min(dim - begin, Block::size);
    for (index_t g = 0; g < queries; ++g) {
      sum_codes(p + g * next, values, b, numbers, out + std::ptrdiff_t{g} * dim + begin);
    }
  }
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace kvmeld::inline v0
