// SPDX-License-Identifier: MIT
/// Narrow rows that merge, and their running means in float beside them.
#pragma once

#include <cstring>  // std::memcpy

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// Adds `Σ weight · row` of the sources up to `end`, in their order, to this lane's numbers `i ...`
/// of one row. `Many` rows are in flight at once.
template <index_t Many, class Scalar>
KVMELD_DEVICE void add_sources(const head_rows<Scalar>& x, float merge_source::*weight,
                               const merge_source* e, const merge_source* end, index_t i,
                               index_t dim, bool aligned, float (&sum)[vector_16<Scalar>::size]) {
  KVMELD_ROLLED
  for (; e < end; e += Many) {
    row_vector<Scalar> row[Many];
    float w[Many];
    unrolled<Many>([&](index_t k) {
      const merge_source& from = e[k < end - e ? k : 0];
      row[k] = load_row(x.at(from.source), i, dim, aligned);
      w[k] = from.*weight;
    });
    unrolled<Many>([&](index_t k) {
      if (k < end - e) {
        unrolled<vector_16<Scalar>::size>(
            [&](index_t j) { sum[j] = multiply_add(w[k], to_float(row[k][j]), sum[j]); });
      }
    });
  }
}

/// The rounding of a merged row. In fp8, where a number beyond 448 is NaN, a finite sum beyond it
/// is 448 of its sign: a NaN key would make its head's outputs NaN for good. NaN stays NaN.
template <class Scalar>
KVMELD_DEVICE row_vector<Scalar> rounded_sum(const float (&x)[vector_16<Scalar>::size]) {
  if constexpr (row_format<Scalar>::fp8) {
    constexpr float most = 448;
    float kept[vector_16<Scalar>::size];
    unrolled<vector_16<Scalar>::size>([&](index_t j) {
      const bool finite = x[j] - x[j] == 0;
      kept[j] = finite && x[j] > most ? most : finite && x[j] < -most ? -most : x[j];
    });
    return rounded<Scalar>(kept);
  } else {
    return rounded<Scalar>(x);
  }
}

/// `kvmeld::merge::float_rows` of one head, of `count` rows: a mean that is rounded to codes after
/// every step soon stands still, so the mean is kept in float, and the slot has its rounding. In
/// `memory`, per row: the position and one, by its bits (0: a row of none), a number that is 0
/// here, a key and a value. By whole warps; a key is plane 0, a value plane 1.
template <class Scalar>
struct float_rows {
  static constexpr index_t header = 2, width = vector_16<Scalar>::size;
  using numbers = float[width];

  float* memory = nullptr;
  index_t count = 0, dim = 0;
  bool aligned = false;

  /// What belongs to a slot, or is free; null: none is. `known`: is what lies there its mean?
  struct row {
    float* mean = nullptr;
    bool known = false;
  };

  /// Of slot `s` of head `h`, which has `n`. Changes nothing: the block's warps agree on it before
  /// one of them may `put`.
  KVMELD_DEVICE row of(const cache_view<Scalar>& cache, index_t h, index_t n, index_t s) const {
    const index_t* const positions = cache.position_of(h);
    row found{row_at(positions, n, positions[s]), false};
    found.known = found.mean != nullptr && position_in(found.mean) == positions[s] &&
                  is_rounding(found.mean + header, cache.keys.of(h).at(s)) &&
                  is_rounding(found.mean + header + dim, cache.values.of(h).at(s));
    return found;
  }
  /// This lane's numbers of the mean, or of the slot's row where that is not known.
  KVMELD_DEVICE void take(const row& own, index_t plane, const Scalar* stored, numbers& x) const {
    const index_t i = lane() * width;
    const auto codes = load_row(stored, i, dim, aligned);
    unrolled<width>([&](index_t j) {
      x[j] = i + j >= dim ? 0.0F
             : own.known  ? own.mean[header + plane * dim + i + j]
                          : to_float(codes[j]);
    });
  }
  /// Makes `x` the mean, where there is a row for it, and its rounding the slot's.
  KVMELD_DEVICE void put(const row& own, index_t plane, Scalar* stored, const numbers& x) const {
    const index_t i = lane() * width;
    if (own.mean != nullptr) {
      float* const mean = own.mean + header + plane * dim;
      unrolled<width>([&](index_t j) {
        if (i + j < dim) {
          mean[i + j] = x[j];
        }
      });
    }
    store_row(stored, i, dim, aligned, rounded_sum<Scalar>(x));
  }
  /// By one thread, when all have found theirs.
  KVMELD_DEVICE void name(const row& own, index_t position) const {
    if (own.mean != nullptr) {
      const index_t bits = position + 1;
      std::memcpy(own.mean, &bits, sizeof bits);
    }
  }

 private:
  KVMELD_DEVICE static index_t position_in(const float* own) {
    index_t bits = 0;
    std::memcpy(&bits, own, sizeof bits);
    return bits - 1;
  }
  /// That of the slot at `position`; else one of a slot that is gone.
  KVMELD_DEVICE float* row_at(const index_t* positions, index_t n, index_t position) const {
    const auto at = [&](index_t r) { return memory + std::ptrdiff_t{r} * (2 * dim + header); };
    KVMELD_ROLLED
    for (index_t r = 0; r < count; ++r) {
      if (position_in(at(r)) == position) {
        return at(r);
      }
    }
    KVMELD_ROLLED
    for (index_t r = 0; r < count; ++r) {
      const index_t held = position_in(at(r));
      bool is_there = false;
      KVMELD_ROLLED
      for (index_t s = lane(); s < n; s += 32) {
        is_there = is_there || positions[s] == held;
      }
      if (ballot(is_there) == 0) {
        return at(r);
      }
    }
    return nullptr;
  }
  /// Is the stored row the rounding of `x [dim]`?
  KVMELD_DEVICE bool is_rounding(const float* x, const Scalar* stored) const {
    const index_t i = lane() * width;
    numbers mine;
    unrolled<width>([&](index_t j) { mine[j] = i + j < dim ? x[i + j] : 0.0F; });
    const auto codes = rounded_sum<Scalar>(mine), held = load_row(stored, i, dim, aligned);
    bool same = true;
    unrolled<width>([&](index_t j) {
      same = same && (i + j >= dim || to_float(codes[j]) == to_float(held[j]));
    });
    return ballot(!same) == 0;
  }
};

}  // namespace kvmeld::cuda::detail
