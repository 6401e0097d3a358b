// SPDX-License-Identifier: MIT
/// Version and index type: what every other header starts from, errors and the integers with it.
#pragma once

#if defined(_MSVC_LANG) ? _MSVC_LANG < 202002L : __cplusplus < 202002L
#error "kvmeld needs C++20: compile the files that include it with -std=c++20 (or /std:c++20)"
#endif

#include <cmath>     // FP_FAST_FMAF
#include <concepts>  // std::integral
#include <cstddef>   // IWYU pragma: export
#include <cstdint>   // IWYU pragma: export

#include "kvmeld/error.hpp"  // IWYU pragma: export

#define KVMELD_VERSION_MAJOR 0
#define KVMELD_VERSION_MINOR 1
#define KVMELD_VERSION_PATCH 0

// Masks and ranks are infinities, and NaN is found by comparison with itself.
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "kvmeld needs infinity and NaN: add -fno-finite-math-only to -ffast-math (or -Ofast)"
#endif

/// What compiles for the host and, by nvcc, for the device too.
#ifdef __CUDACC__
#define KVMELD_HD __host__ __device__
#else
#define KVMELD_HD
#endif

// A name for the instruction sets that code is compiled for. What the preprocessor writes by them
// is in an inline namespace of this name: of two files with other flags, each calls its own.
#ifdef __AVX__
#define KVMELD_HAS_AVX 1
#else
#define KVMELD_HAS_AVX 0
#endif
#ifdef __AVX2__
#define KVMELD_HAS_AVX2 1
#else
#define KVMELD_HAS_AVX2 0
#endif
#ifdef __AVX512F__
#define KVMELD_HAS_AVX512 1
#else
#define KVMELD_HAS_AVX512 0
#endif
#ifdef __F16C__
#define KVMELD_HAS_F16C 1
#else
#define KVMELD_HAS_F16C 0
#endif
#if defined(FP_FAST_FMAF) || defined(__FMA__)  // clang has the second only
#define KVMELD_HAS_FMA 1
#else
#define KVMELD_HAS_FMA 0
#endif
#ifdef __CUDACC__  // by nvcc, which is given no vectors
#define KVMELD_HAS_NVCC 1
#else
#define KVMELD_HAS_NVCC 0
#endif
#define KVMELD_NAME_OF(avx, avx2, avx512, f16c, fma, nvcc) \
  avx_##avx##_avx2_##avx2##_avx512_##avx512##_f16c_##f16c##_fma_##fma##_nvcc_##nvcc
#define KVMELD_NAME(avx, avx2, avx512, f16c, fma, nvcc) \
  KVMELD_NAME_OF(avx, avx2, avx512, f16c, fma, nvcc)
#define KVMELD_INSTRUCTIONS                                                                        \
  KVMELD_NAME(KVMELD_HAS_AVX, KVMELD_HAS_AVX2, KVMELD_HAS_AVX512, KVMELD_HAS_F16C, KVMELD_HAS_FMA, \
              KVMELD_HAS_NVCC)

/// A function whose frame no other frame takes in: threads may have little stack (musl: 128 KiB).
#if defined(__GNUC__)
#define KVMELD_NOINLINE [[gnu::noinline]]
#elif defined(_MSC_VER)
#define KVMELD_NOINLINE __declspec(noinline)
#else
#define KVMELD_NOINLINE
#endif

/// Before a loop of few turns over registers: g++ keeps arrays in memory that it indexes in a loop,
/// and unrolls too late to find out.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define KVMELD_UNROLL_EARLY _Pragma("GCC unroll 16")
#else
#define KVMELD_UNROLL_EARLY
#endif

namespace kvmeld::inline v0 {

/// Heads, slots, rows, dimensions, positions. Signed, so that differences are what they seem.
using index_t = std::int32_t;

/// The most numbers that a key or a value has.
inline constexpr index_t longest_row = 4096;

/// A count or an index as the standard library has it; of several, their product.
template <std::integral... N>
constexpr std::size_t as_size(N... n) {
  return (std::size_t{1} * ... * static_cast<std::size_t>(n));
}

}  // namespace kvmeld::inline v0
