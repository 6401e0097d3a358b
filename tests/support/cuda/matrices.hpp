// SPDX-License-Identifier: MIT
/// Tensor cores and the registers that feed them, for the CUDA emulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/accesses.hpp"
#include "cuda/scalars.hpp"
#include "cuda/shared.hpp"

namespace kvmeld::cuda {

inline constexpr unsigned all_lanes = 0xffffffffU;

inline index_t lane() { return emulator::now().thread() % 32; }

/// Two 16-bit elements of global memory at a multiple of 4 bytes.
template <class T>
unsigned load_pair(const T* from) {
  static_assert(sizeof(T) == 2);
  emulator::expect_aligned(from, 4);
  emulator::count(emulator::traffic::kind::load, from, 4);
  unsigned x = 0;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
unsigned pair_of(T a, T b) {
  const T both[2] = {a, b};
  unsigned x = 0;
  std::memcpy(&x, both, sizeof x);
  return x;
}
template <class T>
T low_of(unsigned x) {
  T both[2];
  std::memcpy(static_cast<void*>(both), &x, sizeof x);
  return both[0];
}
template <class T>
T high_of(unsigned x) {
  return low_of<T>(x >> 16);
}
template <class T>
unsigned min_pairs(unsigned x, unsigned y) {
  const auto least = [](T a, T b) { return to_float(b) < to_float(a) ? b : a; };
  return pair_of(least(low_of<T>(x), low_of<T>(y)), least(high_of<T>(x), high_of<T>(y)));
}
inline void prefetch(const void*) {}
inline void store_pair(float* to, float a, float b) {
  emulator::expect_aligned(to, 8);
  emulator::count(emulator::traffic::kind::store, to, 8);
  to[0] = a, to[1] = b;
}

/// Registers as the hardware deals them to the lanes: lane l has rows l / 4 and l / 4 + 8 of A and
/// C and column l / 4 of B, and in them pairs at 2 (l mod 4), for A and B also 8 further on.
template <class T>
void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct operands {
    T a[4][2], b[2][2];
    float c[4];
  } mine;
  struct sums {
    float c[4];
  };
  static_assert(sizeof mine == 40);
  std::memcpy(static_cast<void*>(mine.a), a, sizeof a);
  std::memcpy(static_cast<void*>(mine.b), b, sizeof b);
  std::memcpy(mine.c, c, sizeof c);
  auto& all = emulator::now().meet({"mma_16x8x16", 0, all_lanes, {file, line}}, &mine, sizeof mine);
  if (!all.reduced) {  // the product of all lanes, a row of C at once
    using eight = float __attribute__((vector_size(32)));
    float left[16][16];
    eight right[16], product[16];
    for (index_t l = 0; l < 32; ++l) {
      const auto x = all.template get<operands>(l);
      const index_t row = l / 4, pair = l % 4 * 2;
      for (index_t e = 0; e < 2; ++e) {
        for (index_t further = 0; further < 2; ++further) {
          left[row][8 * further + pair + e] = to_float(x.a[2 * further][e]);
          left[row + 8][8 * further + pair + e] = to_float(x.a[2 * further + 1][e]);
          right[8 * further + pair + e][row] = to_float(x.b[further][e]);
        }
        product[row][pair + e] = x.c[e], product[row + 8][pair + e] = x.c[2 + e];
      }
    }
    for (const index_t k : {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15}) {
      for (index_t row = 0; row < 16; ++row) {
        product[row] += left[row][k] * right[k];
      }
    }
    for (index_t l = 0; l < 32; ++l) {
      const index_t row = l / 4, pair = l % 4 * 2;
      all.set(l, sums{{product[row][pair], product[row][pair + 1], product[row + 8][pair],
                       product[row + 8][pair + 1]}});
    }
    all.reduced = true;
    if (emulator::traffic::current != nullptr) {
      ++emulator::traffic::current->mmas;
    }
  }
  const auto got = all.template get<sums>(lane());
  std::memcpy(c, got.c, sizeof c);
}

struct matrices {
  unsigned of[4];
};

namespace emulator {

/// Lane l reads two elements of each of four matrices, at places of rows that other lanes name.
template <class T, index_t N, class Pair>
matrices read_matrices(const char* name, const shared_array<T, N>& from, index_t i, Pair pair,
                       site at) {
  from.vector(i);  // the row of this lane: aligned, in the array, and written
  const auto& all = now().meet({name, 0, all_lanes, at}, &i, sizeof i);
  matrices x{};
  for (index_t m = 0; m < 4; ++m) {
    x.of[m] = pair([&](index_t row) { return all.template get<index_t>(8 * m + row); });
  }
  return x;
}

}  // namespace emulator

template <class T, index_t N>
matrices load_matrices(const shared_array<T, N>& from, index_t i,
                       const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const index_t row = lane() / 4, column = lane() % 4 * 2;
  return emulator::read_matrices(
      "load_matrices", from, i, [&](auto row_at) { return from.pair_of_row(row_at(row) + column); },
      {file, line});
}
template <class T, index_t N>
matrices load_matrices_transposed(const shared_array<T, N>& from, index_t i,
                                  const char* file = __builtin_FILE(),
                                  int line = __builtin_LINE()) {
  const index_t row = lane() / 4, column = lane() % 4 * 2;
  return emulator::read_matrices(
      "load_matrices_transposed", from, i,
      [&](auto row_at) {  // element `row` of the rows `column` and the next
        const auto element = [&](index_t r) {
          return from.pair_of_row(row_at(r) + row / 2 * 2) >> row % 2 * 16 & 0xffffU;
        };
        return element(column) | element(column + 1) << 16;
      },
      {file, line});
}
inline unsigned transposed(unsigned x, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE()) {
  const auto& all = emulator::now().meet({"transposed", 0, all_lanes, {file, line}}, &x, sizeof x);
  const index_t row = lane() / 4, column = lane() % 4 * 2;
  const auto element = [&](index_t r) {
    return all.get<unsigned>(4 * r + row / 2) >> row % 2 * 16 & 0xffffU;
  };
  return element(column) | element(column + 1) << 16;
}

}  // namespace kvmeld::cuda
