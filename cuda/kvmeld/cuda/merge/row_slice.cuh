// SPDX-License-Identifier: MIT
/// A block's slice of all rows of a head's keys or values.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// `Lanes` times 16 bytes of every row of a plan, a lane 16.
template <class Scalar, index_t Lanes>
struct row_slice {
  static constexpr index_t lanes = Lanes;  // of a row
  static constexpr index_t pieces = 4;     // sources of a row at once; so many lanes know one
  static constexpr index_t width = vector_16<Scalar>::size;
  static_assert(pieces <= lanes && 32 % lanes == 0);
  using vector = vector_16<Scalar>;

  head_rows<Scalar> x;
  float merge_source::*weight;
  const float* delta;  // [rows, dim], or null
  index_t dim;
  bool aligned;
  index_t rows;
  const index_t* begin;
  const merge_source* sources;
  index_t i;  // this lane's elements begin here; not below `dim`: none

  /// A row's sources; none where there is no row.
  struct source_range {
    index_t begin = 0, count = 0;
  };
  /// The first lane of this lane's row.
  KVMELD_DEVICE static index_t first_lane() { return lane() / lanes * lanes; }

  KVMELD_DEVICE source_range range_of(index_t r) const {
    if (r >= rows) {
      return {};
    }
    const index_t first = begin[r];
    return {first, begin[r + 1] - first};
  }
  KVMELD_DEVICE float correction(index_t r, index_t j) const {
    return delta != nullptr && i + j < dim ? delta[std::ptrdiff_t{r} * dim + i + j] : 0.0F;
  }
  KVMELD_DEVICE static void add(float (&sum)[width], float w, const vector& row) {
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      sum[j] += w * to_float(row[j]);
    }
  }
  KVMELD_DEVICE static vector rounded(const float (&sum)[width]) {
    vector y;
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      y[j] = from_float<Scalar>(sum[j]);
    }
    return y;
  }
};

}  // namespace kvmeld::cuda::detail
