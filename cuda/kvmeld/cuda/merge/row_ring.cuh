// SPDX-License-Identifier: MIT
/// What a block has in flight of the rows that it merges.
#pragma once

#include "kvmeld/cuda/merge/row_slice.cuh"

namespace kvmeld::cuda::detail {

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
