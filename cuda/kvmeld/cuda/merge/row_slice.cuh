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
};

/// Shared memory for `stages` times `pieces` pieces of 16 bytes a thread, each in a place that no
/// other thread touches: copies are waited for, but need no barrier. A block of 256 threads has up
/// to 64 KiB in flight: at a latency of 1 µs 64 GB/s, and two blocks a multiprocessor take more
/// than its share of the memory's rate.
template <class Scalar, index_t Threads>
struct row_ring {
  static constexpr index_t stages = 4;
  static constexpr index_t pieces = row_slice<Scalar, 4>::pieces, width = vector_16<Scalar>::size;

  shared_array<Scalar, stages * pieces * Threads * width> places;

  /// 16 bytes of a row, from element `i < dim` on, zeros after the row's end.
  KVMELD_DEVICE void copy(index_t stage, index_t piece, const Scalar* row, index_t i, index_t dim,
                          bool aligned) {
    if (aligned) {
      const index_t left = dim - i < width ? dim - i : width;
      copy_async(places, place(stage, piece), row + i, left * static_cast<index_t>(sizeof(Scalar)));
    } else {
      places.set_vector(place(stage, piece), load_row(row, i, dim, false));
    }
  }
  KVMELD_DEVICE vector_16<Scalar> at(index_t stage, index_t piece) const {
    return places.vector(place(stage, piece));
  }
  KVMELD_DEVICE static index_t after(index_t stage) { return stage == stages - 1 ? 0 : stage + 1; }

 private:
  KVMELD_DEVICE static index_t place(index_t stage, index_t piece) {
    return ((stage * pieces + piece) * Threads + thread_index()) * width;
  }
};

}  // namespace kvmeld::cuda::detail
