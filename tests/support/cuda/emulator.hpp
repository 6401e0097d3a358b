// SPDX-License-Identifier: MIT
/// The thin layer of `kvmeld/cuda/device/device.cuh` without a GPU: blocks run one after another,
/// their threads as fibers, in an order that the stream's seed shuffles. What a GPU would leave
/// undefined (a barrier not met by all, a mask not agreed on, a race in shared memory) is thrown as
/// `emulator::error`; overruns of global memory are for the tests' guards and AddressSanitizer.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "cuda/accesses.hpp"
#include "cuda/launches.hpp"
#include "cuda/matrices.hpp"
#include "cuda/scalars.hpp"
#include "cuda/shared.hpp"
#include "kvmeld/cuda/error.cuh"
#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/search/rules.hpp"

namespace kvmeld::cuda {

// ---------------------------------------------------------------------------- indices

inline index_t thread_index() { return emulator::now().thread(); }
inline index_t warp() { return emulator::now().thread() / 32; }
inline extent block_index() { return emulator::block_index; }
inline extent grid() { return emulator::grid; }

// ---------------------------------------------------------------------------- together
// File and line are the caller's, for the messages.

inline void sync_block(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::now().sync_block({file, line});
}
inline void sync_warp(unsigned mask = all_lanes, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  emulator::now().meet({"sync_warp", 0, mask, {file, line}}, "", 0, true);
}
inline void thread_fence() {}

template <class T>
T shuffle(T x, index_t from, unsigned mask = all_lanes, const char* file = __builtin_FILE(),
          int line = __builtin_LINE()) {
  const emulator::meeting call{"shuffle", 0, mask, {file, line}};
  const auto& all = emulator::now().meet(call, &x, sizeof x);
  if (from < 0 || from > 31 || (mask >> from & 1U) == 0) {
    emulator::now().fail("lane " + std::to_string(from) + " is not in the mask", call);
  }
  return all.template get<T>(from);
}
template <class T>
T shuffle_xor(T x, index_t distance, unsigned mask = all_lanes, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  const emulator::meeting call{"shuffle_xor", distance, mask, {file, line}};
  const auto& all = emulator::now().meet(call, &x, sizeof x);
  const index_t from = lane() ^ distance;
  if (from < 0 || from > 31 || (mask >> from & 1U) == 0) {
    emulator::now().fail("lane " + std::to_string(from) + " is not in the mask", call);
  }
  return all.template get<T>(from);
}
inline unsigned ballot(bool yes, unsigned mask = all_lanes, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  auto& all = emulator::now().meet({"ballot", 0, mask, {file, line}}, &yes, sizeof yes);
  if (!all.reduced) {
    unsigned bits = 0;
    for (index_t l = 0; l < 32; ++l) {
      bits |= (mask >> l & 1U) != 0 && all.get<bool>(l) ? 1U << l : 0U;
    }
    all.set(0, bits), all.reduced = true;
  }
  return all.get<unsigned>(0);
}

inline unsigned equal_lanes(index_t x, unsigned mask = all_lanes,
                            const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const auto& all = emulator::now().meet({"equal_lanes", 0, mask, {file, line}}, &x, sizeof x);
  unsigned same = 0;
  for (index_t l = 0; l < 32; ++l) {
    same |= (mask >> l & 1U) != 0 && all.get<index_t>(l) == x ? 1U << l : 0U;
  }
  return same;
}

inline index_t lowest_lane(unsigned lanes) { return __builtin_ctz(lanes); }
inline index_t count_lanes(unsigned lanes) { return __builtin_popcount(lanes); }

namespace emulator {

/// The butterfly of the hardware's loop over `shuffle_xor`, in one meeting.
template <class T, class Op>
T reduce(const char* name, T x, index_t width, Op op, site at) {
  exchange& all = now().meet({name, width, all_lanes, at}, &x, sizeof x);
  if (!all.reduced) {
    for (index_t d = width / 2; d > 0; d /= 2) {
      for (index_t l = 0; l < 32; ++l) {
        if ((l & d) == 0) {
          const T a = all.get<T>(l), b = all.get<T>(l ^ d);
          all.set(l, op(a, b)), all.set(l ^ d, op(b, a));
        }
      }
    }
    all.reduced = true;
  }
  return all.get<T>(lane());
}

}  // namespace emulator

template <class T>
T reduce_sum(T x, index_t width = 32, const char* file = __builtin_FILE(),
             int line = __builtin_LINE()) {
  return emulator::reduce("reduce_sum", x, width, [](T a, T b) { return static_cast<T>(a + b); },
                          {file, line});
}
template <class T>
T reduce_max(T x, index_t width = 32, const char* file = __builtin_FILE(),
             int line = __builtin_LINE()) {
  return emulator::reduce("reduce_max", x, width, [](T a, T b) { return b > a ? b : a; },
                          {file, line});
}

inline index_t reduce_min(index_t x, const char* file = __builtin_FILE(),
                          int line = __builtin_LINE()) {
  return emulator::reduce("reduce_min", x, 32, [](index_t a, index_t b) { return b < a ? b : a; },
                          {file, line});
}

// ---------------------------------------------------------------------------- memory

template <class T>
vector_16<T> load_16(const T* from) {
  emulator::count(emulator::traffic::kind::load, from, 16);
  return *reinterpret_cast<const vector_16<T>*>(from);
}
template <class T>
vector_16<unsigned> load_words(const T* from) {
  emulator::expect_aligned(from, 16);
  emulator::count(emulator::traffic::kind::load, from, 16);
  vector_16<unsigned> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
void store_16(T* to, const vector_16<T>& x) {
  emulator::count(emulator::traffic::kind::store, to, 16);
  *reinterpret_cast<vector_16<T>*>(to) = x;
}

template <index_t N>
index_t add_shared(shared_array<index_t, N>& to, index_t i, index_t n) {
  return to.add(i, n);
}
inline index_t add_global(index_t* to, index_t n) {
  const index_t before = *to;
  *to += n;
  return before;
}

enum class reads { again, once };

/// Until it is waited for, its place holds NaN.
template <reads = reads::again, class T, index_t N>
void copy_async(shared_array<T, N>& to, index_t i, const T* from, index_t bytes = 16) {
  emulator::expect_aligned(from, 16);
  emulator::count(emulator::traffic::kind::load, from, static_cast<std::size_t>(bytes));
  vector_16<T> x;
  std::memset(static_cast<void*>(&x), 0xff, sizeof x);
  to.set_vector(i, x);
  std::memset(static_cast<void*>(&x), 0, sizeof x);
  std::memcpy(static_cast<void*>(&x), from, static_cast<std::size_t>(bytes));
  emulator::now().copies().later([&to, i, from, bytes, x] {
    if (std::memcmp(&x, from, static_cast<std::size_t>(bytes)) != 0) {
      emulator::now().fail("copy_async: its source was written before the copy was waited for");
    }
    to.set_vector(i, x);
  });
}
inline void commit_async() { emulator::now().copies().commit(); }
template <index_t Groups>
void wait_async() {
  emulator::now().copies().wait(Groups);
}

namespace emulator {

/// `x` without its last `bits` bits, 0 where it is subnormal.
inline float coarse(float x, unsigned bits) {
  if (x != x || std::isinf(x)) {
    return x;
  }
  return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : float_of(bits_of(x) >> bits << bits);
}

/// `y = f(x)` as a GPU may round it: with KVMELD_EMULATOR_ULP set, one unit in the last place up,
/// down or neither, by the bits of `x`. A test that holds either way does not lean on the host's
/// library.
inline float rounded_otherwise(float y, float x) {
  static const bool otherwise = std::getenv("KVMELD_EMULATOR_ULP") != nullptr;
  if (!otherwise || y == 0 || y == 1) {  // these are exact everywhere
    return y;
  }
  const std::uint32_t third = (bits_of(x) * 2654435761U >> 16) % 3;
  return third == 0 ? y : std::nextafter(y, third == 1 ? INFINITY : -INFINITY);
}

}  // namespace emulator

using kvmeld::detail::multiply_add;
inline float exponential(float x) { return emulator::rounded_otherwise(std::exp(x), x); }
inline float logarithm(float x) { return emulator::rounded_otherwise(std::log(x), x); }
/// As coarse as the hardware's, so that no test is content with less error: subnormal numbers are
/// 0, and the last two bits are lost.
inline float exp2_approx(float x) { return emulator::coarse(std::exp2(emulator::coarse(x, 0)), 2); }
inline float log2_approx(float x) { return emulator::coarse(std::log2(emulator::coarse(x, 0)), 2); }
inline double exponential(double x) { return std::exp(x); }
inline double logarithm(double x) { return std::log(x); }
inline float square_root(float x) { return std::sqrt(x); }
inline float inverse_square_root(float x) {
  return emulator::rounded_otherwise(1 / std::sqrt(x), x);
}
inline double square_root(double x) { return std::sqrt(x); }
constexpr double pi = 3.14159265358979323846;
inline float cosine_pi(float x) {
  return emulator::rounded_otherwise(static_cast<float>(std::cos(pi * double{x})), x);
}
inline float sine_pi(float x) {
  return emulator::rounded_otherwise(static_cast<float>(std::sin(pi * double{x})), x);
}
inline double power(double x, double y) { return std::pow(x, y); }
inline double nearest_integer(double x) { return std::rint(x); }

}  // namespace kvmeld::cuda
