// SPDX-License-Identifier: MIT
/// The nearest keys of a few of a head's own, found as its keys come by.
#pragma once

#include "kvmeld/cuda/score/tile_cosines.cuh"

namespace kvmeld::cuda::detail {

/// The most similar by cosine to each of 8 keys of a head, ties to the lower slot. By a warp, whose
/// lanes have their rows as `tile_cosines` deals them.
template <class Scalar, index_t Depth>
class nearest_in_tiles {
 public:
  using cosines = tile_cosines<Scalar, Depth>;
  static constexpr bool compares = true, of_values = false;
  static constexpr index_t size = cosines::size;  // elements of the keys
  using products = typename cosines::products;

  /// Starts to copy the keys of slots `slot_of(r)`, −1: none, by a block's first warp.
  template <index_t N, class SlotOf>
  KVMELD_DEVICE void begin(shared_array<Scalar, N>& to, const cache_view<Scalar>& cache, index_t h,
                           SlotOf slot_of) {
    if (warp() == 0) {
      cosines::begin(to, 0, cache.keys.of(h), cache.dim, slot_of);
      commit_async();
    }
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      slot_[j] = slot_of(lane() % 4 * 2 + j), near_[j] = -1, cosine_[j] = 0;
    }
  }
  /// The keys' own lengths, once they are there.
  template <index_t N>
  KVMELD_DEVICE void measure(const shared_array<Scalar, N>& rows) {
    of_.measure(rows, 0);
  }

  template <index_t N>
  KVMELD_DEVICE static void multiply_keys(products& x, const shared_array<Scalar, N>& rows,
                                          index_t d, const matrices& a) {
    cosines::multiply(x, rows, 0, d, a);
  }
  /// The tile's slots are `s0 ...`, below `end`.
  KVMELD_DEVICE void take_keys(const products& x, index_t s0, index_t end) {
    of_.each(x, [&](index_t i, index_t j, float ratio) {
      const index_t s = s0 + lane() / 4 + 8 * i;
      const float cosine = ratio == ratio ? ratio : 0.0F;
      const bool nearer = near_[j] < 0 || cosine > cosine_[j];
      if (nearer && s < end && s != slot_[j]) {
        cosine_[j] = cosine, near_[j] = s;
      }
    });
  }
  /// The warp's nearest of each key into `to[first ...]`; 0: none.
  template <index_t N>
  KVMELD_DEVICE void write(shared_array<candidate, N>& to, index_t first) const {
    candidate best[2];
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      best[j] = near_[j] < 0 ? candidate{0} : most_candidate(ordered(cosine_[j]), near_[j]);
    }
    write_best(to, first, best);
  }

 private:
  cosines of_;
  index_t slot_[2] = {}, near_[2] = {};
  float cosine_[2] = {};
};

}  // namespace kvmeld::cuda::detail
