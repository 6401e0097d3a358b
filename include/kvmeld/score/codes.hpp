// SPDX-License-Identifier: MIT
/// Rows in q8_0 as attention reads them, and the instructions for it. They are AVX2's: in a program
/// for every x86-64 on Linux the processor is queried when it runs. Elsewhere loops compute the
/// same bits.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::fill, std::min

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

/// Where the rows of a tile begin, in one page or several, and those that follow it.
class code_rows {
 public:
  /// Of `count` slots from `first` on; `from(s)`: those of a page from slot `s` on.
  template <class From>
  code_rows(const head_ref& head, index_t first, index_t count, From from) : count_(count) {
    const index_t known = std::min(count + ahead, head.length() - first);
    for (index_t i = 0; i < known;) {
      const head_rows page = from(first + i);
      const index_t end = std::min(known, i + head.rows_from(first + i));
      for (index_t r = 0; i < end; ++i, ++r) {
        rows_[i] = reinterpret_cast<const q8_0*>(page.data + r * page.row);
      }
    }
    std::fill(rows_ + known, rows_ + count + ahead, rows_[known - 1]);
  }

  index_t count() const { return count_; }
  const q8_0* operator[](index_t s) const { return rows_[s]; }
  /// Fetches `blocks` of the row that is read some rows after `s`. For several queries: with one,
  /// rows are read so fast, and in order, that processors fetch them better by themselves.
  EIGEN_ALWAYS_INLINE void fetch(index_t s, index_t blocks) const {
    constexpr std::ptrdiff_t line = 64;
    const auto* const row = reinterpret_cast<const std::byte*>(rows_[s + ahead]);
    const std::ptrdiff_t bytes = blocks * std::ptrdiff_t{sizeof(q8_0)};
    std::ptrdiff_t i = 0;
    do {  // the last line is mostly the next row's first
      Eigen::internal::prefetch(row + i);
      i += line;
    } while (i < bytes - line);
  }

 private:
  static constexpr index_t ahead = 32;

  const q8_0* rows_[tile_slots + ahead];
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
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256 scales_of(const q8_0& block) {
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(block.scale.x)));
}
#endif

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace kvmeld::inline v0
