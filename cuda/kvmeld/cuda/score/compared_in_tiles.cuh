// SPDX-License-Identifier: MIT
/// What is most like a few of a head's slots, found as its keys, or keys and values, come by.
#pragma once

#include "kvmeld/cuda/score/tile_cosines.cuh"

namespace kvmeld::cuda::detail {

/// A key that measures nothing is like no other.
KVMELD_DEVICE inline candidate near_candidate(float cosine, index_t s) {
  return most_candidate(ordered(cosine == cosine ? cosine : 0.0F), s);
}

/// The most similar by cosine to each of 8 keys of a head, ties to the lower slot. By a warp, whose
/// lanes have their rows as `tile_cosines` deals them.
template <class Scalar, index_t Depth>
class nearest_in_tiles {
 public:
  using cosines = tile_cosines<Scalar, Depth>;
  static constexpr bool compares = true, of_values = false;
  static constexpr index_t size = cosines::size;  // elements of the keys
  using products = typename cosines::products;

  KVMELD_DEVICE static candidate candidate_of(float key, float, index_t s, index_t) {
    return near_candidate(key, s);
  }
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

/// EMS, Eq. 5: R = cos(k_a, k_b) · cos(v_a, v_b) from the two, negative when both are.
KVMELD_HD inline float redundancy(float keys, float values) {
  return keys < 0 && values < 0 ? -keys * values : keys * values;
}
/// A centre as a candidate: the most redundant, then the earlier token.
KVMELD_DEVICE inline candidate centre_candidate(float keys, float values, index_t position) {
  return most_candidate(ordered(redundancy(keys, values)), position);
}

/// The most redundant to each of 8 entries of a head (Eq. 5), ties to the earlier token. By a warp,
/// whose lanes have their rows as `tile_cosines` deals them.
template <class Scalar, index_t Depth>
class centres_in_tiles {
 public:
  using cosines = tile_cosines<Scalar, Depth>;
  static constexpr bool compares = true, of_values = true;
  static constexpr index_t size = 2 * cosines::size;  // elements of the entries' keys, then values
  using products = typename cosines::products;

  KVMELD_DEVICE static candidate candidate_of(float key, float value, index_t, index_t position) {
    return centre_candidate(key, value, position);
  }
  /// Starts to copy the rows of slots `slot_of(r)`, −1: none, by a block: keys by its first warp,
  /// values by its second.
  template <index_t N, class SlotOf>
  KVMELD_DEVICE void begin(shared_array<Scalar, N>& to, const cache_view<Scalar>& cache, index_t h,
                           SlotOf slot_of) {
    if (warp() < 2) {
      cosines::begin(to, warp() * cosines::size,
                     warp() == 0 ? cache.keys.of(h) : cache.values.of(h), cache.dim, slot_of);
      commit_async();
    }
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      slot_[j] = slot_of(lane() % 4 * 2 + j), best_[j] = 0;
    }
  }
  /// The rows' own lengths, once they are there.
  template <index_t N>
  KVMELD_DEVICE void measure(const shared_array<Scalar, N>& rows) {
    of_keys_.measure(rows, 0), of_values_.measure(rows, cosines::size);
  }

  template <index_t N>
  KVMELD_DEVICE static void multiply_keys(products& x, const shared_array<Scalar, N>& rows,
                                          index_t d, const matrices& a) {
    cosines::multiply(x, rows, 0, d, a);
  }
  /// Of a tile's keys, which come before its values.
  KVMELD_DEVICE void take_keys(const products& x, index_t, index_t) {
    of_keys_.each(x, [&](index_t i, index_t j, float cosine) { key_[i][j] = cosine; });
  }
  /// Of a tile's values, at `at` of `tiles`. Its slots are `s0 ...`, below `end`; `position`: of
  /// slot lane mod 16; `is_centre(position)`.
  template <index_t N, index_t M, class IsCentre>
  KVMELD_DEVICE void take_values(const shared_array<Scalar, N>& rows,
                                 const shared_array<Scalar, M>& tiles, index_t at, index_t s0,
                                 index_t end, index_t position, IsCentre is_centre) {
    products x;
    KVMELD_UNROLL
    for (index_t d = 0; d < Depth / 16; ++d) {
      cosines::multiply(x, rows, cosines::size, d, cosines::tile::left(tiles, at, d));
    }
    const index_t row = lane() / 4;
    const index_t positions[2] = {shuffle(position, row), shuffle(position, row + 8)};
    of_values_.each(x, [&](index_t i, index_t j, float cosine) {
      const index_t s = s0 + row + 8 * i;
      if (s < end && s != slot_[j] && is_centre(positions[i])) {
        const candidate c = centre_candidate(key_[i][j], cosine, positions[i]);
        best_[j] = c > best_[j] ? c : best_[j];
      }
    });
  }
  /// The warp's best of each entry into `to[first ...]`; 0: none.
  template <index_t N>
  KVMELD_DEVICE void write(shared_array<candidate, N>& to, index_t first) const {
    write_best(to, first, best_);
  }

 private:
  cosines of_keys_, of_values_;
  index_t slot_[2] = {};
  float key_[2][2] = {};
  candidate best_[2] = {};
};

}  // namespace kvmeld::cuda::detail
