// SPDX-License-Identifier: MIT
/// Rotary position embedding on the device.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda {

/// Numbers `x`, `y` of a row, and which these are; −1: there is no second.
struct number_pair {
  index_t i = -1, j = -1;
  float x = 0, y = 0;

  /// `use(i, x)`, `use(j, y)`.
  template <class Use>
  KVMELD_DEVICE void each(Use use) const {
    use(i, x);
    if (j >= 0) {
      use(j, y);
    }
  }
};

/// RoPE of one dim: pair `p` of a row turns by `frequency[p]` radians a position. An odd last
/// element stays.
struct rope_params {
  struct angle {
    float cosine, sine;
  };

  double frequency[max_dim / 2] = {};
  bool halves = true;  ///< pairs (p, p + dim/2); else (2p, 2p + 1)

  /// As `kvmeld::rotation` has it: the angle exact (double, brought into one turn), its sine a
  /// float's.
  KVMELD_DEVICE angle of_pair(index_t p, index_t positions) const {
    constexpr double whole = 6.283185307179586476925;
    const double turns = static_cast<double>(positions) * (frequency[p] * (1 / whole));
    const float half_turns = 2 * static_cast<float>(turns - nearest_integer(turns));
    return {cosine_pi(half_turns), sine_pi(half_turns)};
  }

  /// Which elements pair `p` of a row is; an odd last element has none beside it, and frequency 0.
  KVMELD_DEVICE number_pair elements(index_t dim, index_t p) const {
    if (2 * p + 1 == dim) {
      return {dim - 1, -1};
    }
    return halves ? number_pair{p, p + dim / 2} : number_pair{2 * p, 2 * p + 1};
  }
  /// Pair `p`, turned by so many positions.
  KVMELD_DEVICE number_pair turned(number_pair x, index_t p, index_t positions) const {
    const angle turn = of_pair(p, positions);
    return {x.i, x.j, x.x * turn.cosine - x.y * turn.sine, x.y * turn.cosine + x.x * turn.sine};
  }
  /// Pair `p` of `row [dim]`, turned by so many positions, to `put(element, number)`.
  template <class Scalar, class Put>
  KVMELD_DEVICE void pair(const Scalar* row, index_t dim, index_t p, index_t positions,
                          Put put) const {
    number_pair x = elements(dim, p);
    x.x = to_float(row[x.i]), x.y = x.j < 0 ? 0.0F : to_float(row[x.j]);
    turned(x, p, positions).each(put);
  }
  /// Pairs of a row, an odd last element counted as one.
  KVMELD_DEVICE static index_t pairs(index_t dim) { return (dim + 1) / 2; }
};

/// The rope_params of a `kvmeld::rotary`, for rows of `dim`. Without a rotation rows stay as they
/// are. Refused: a rotation of part of a row.
template <class Rope>
rope_params rope_params_of(const Rope& rope, index_t dim) {
  const index_t pairs = rope.rotated(dim) / 2;
  expects(errc::unsupported, !rope.rotates() || pairs == dim / 2,
          "cuda: expected a rotation of all ", dim, " dimensions, got one of ", 2 * pairs);
  rope_params x;
  x.halves = rope.pairs_as() == decltype(rope.pairs_as())::halves;
  for (index_t p = 0; p < pairs && p < max_dim / 2; ++p) {
    x.frequency[p] = rope.frequency(p, dim);
  }
  return x;
}

}  // namespace kvmeld::cuda
