// SPDX-License-Identifier: MIT
/// Numbers of the rows of device caches, on the host.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/chance.hpp"
#include "kvmeld/cuda/memory/narrow_rows.cuh"

namespace kvmeld::cuda {

/// Small integers and halves thereof: exact in all scalars, in sums too.
inline float whole(emulator::chance& random, index_t most) {
  return static_cast<float>(
      static_cast<index_t>(random.below(static_cast<std::uint32_t>(2 * most + 1))) - most);
}

/// Number `i` of a row of the device's.
template <class Scalar>
float number_at(const Scalar* row, index_t, index_t i) {
  return to_float(row[i]);
}
template <class Number>
float number_at(const q8_0<Number>* row, index_t dim, index_t i) {
  half scale;
  std::memcpy(&scale, row + padded<q8_0<Number>>(dim) + i / block_numbers * 2, sizeof scale);
  return to_float(scale) * static_cast<float>(row[i].code);
}

/// Fills a row in blocks: any codes, each block with a scale of its own.
template <class Scalar>
void fill_blocks(Scalar* row, index_t dim, emulator::chance& random) {
  const index_t codes = padded<Scalar>(dim);
  for (index_t i = 0; i < codes; ++i) {
    row[i].code = static_cast<std::int8_t>(i < dim ? whole(random, 127) : 0.0F);
  }
  for (index_t i = codes; i < row_elements<Scalar>(dim); i += 2) {
    const half scale = from_float<half>(static_cast<float>(1U << random.below(8)) / 64);
    std::memcpy(row + i, &scale, sizeof scale);
  }
}

}  // namespace kvmeld::cuda
