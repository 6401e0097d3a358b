// SPDX-License-Identifier: MIT
/// Rows in blocks of 8, 6 or 4 bits as their formats are defined (ggml's `block_q8_0`,
/// `block_q4_0`; `q6_0` is kvmeld's), and the Hadamard matrix by its entries: double loops over
/// bytes, without the library.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <vector>

namespace oracle {

/// IEEE binary16: 1 sign, 5 exponent and 10 fraction bits, little-endian.
inline double half_at(const std::byte* x) {
  const int bits = std::to_integer<int>(x[0]) + 256 * std::to_integer<int>(x[1]);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 != 0 ? -magnitude : magnitude;
}

/// `dim` numbers of blocks of 32 in `bits` (8, 6 or 4) each: a half `d`, then 32 signed bytes `c`,
/// or 16 bytes of numbers `j` (lower half) and `j + 16` (upper half): `d · c`, `d · (c − 8)`. Of 6
/// bits these are the lower 4, and 8 bytes follow with 2 more of numbers `j`, `j + 8`, `j + 16` and
/// `j + 24`, from the lowest bits on: `d · (c − 32)`.
inline std::vector<double> blocks(const std::byte* row, int bits, int dim) {
  std::vector<double> x;
  for (int i = 0; i < dim; ++i) {
    const std::byte* const block = row + i / 32 * (2 + 4 * bits);
    const int j = i % 32;
    const auto byte = [&](int at) { return std::to_integer<int>(block[2 + at]); };
    int code = bits == 8 ? static_cast<signed char>(block[2 + j])
               : j < 16  ? byte(j) % 16 - 8
                         : byte(j - 16) / 16 - 8;
    if (bits == 6) {
      const int powers[] = {1, 4, 16, 64};
      code += 8 - 32 + 16 * (byte(16 + j % 8) / powers[j / 8] % 4);
    }
    x.push_back(half_at(block) * code);
  }
  return x;
}

/// `H x`, `H_ij = (−1)^popcount(i AND j) / √n`, of each `n` numbers, `n` the largest power of two
/// that divides the dim.
inline std::vector<double> hadamard(const std::vector<double>& x) {
  std::size_t n = 1;
  while (x.size() % (2 * n) == 0) {
    n *= 2;
  }
  std::vector<double> y(x.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      const double sign = std::popcount(i % n & j) % 2 == 0 ? 1 : -1;
      y[i] += sign * x[i / n * n + j] / std::sqrt(static_cast<double>(n));
    }
  }
  return y;
}

}  // namespace oracle
