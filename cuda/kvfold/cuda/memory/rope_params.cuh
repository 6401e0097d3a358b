/// Rotary position embedding on the device.
#pragma once

#include "kvfold/cuda/memory/view.cuh"

namespace kvfold::cuda {

/// RoPE of one dim: pair `p` of a row turns by `frequency[p]` radians a position. An odd last
/// element stays.
struct rope_params {
  struct angle {
    float cosine, sine;
  };

  double frequency[max_dim / 2] = {};
  bool halves = true;  ///< pairs (p, p + dim/2); else (2p, 2p + 1)

  /// As `kvfold::rotation` has it: the angle exact (double, brought into one turn), its sine a
  /// float's.
  KVFOLD_DEVICE angle column_score(index_t p, index_t positions) const {
    constexpr double whole = 6.283185307179586476925;
    const double x = static_cast<double>(positions) * frequency[p];
    const auto reduced = static_cast<float>(x - whole * nearest_integer(x / whole));
    return {cosine(reduced), sine(reduced)};
  }

  /// Elements `i` and `j` of pair `p` of `row [dim]`, turned by so many positions, to
  /// `put(i, x), put(j, y)`; with `p` = dim / 2 an odd last element as it is.
  template <class Scalar, class Put>
  KVFOLD_DEVICE void pair(const Scalar* row, index_t dim, index_t p, index_t positions,
                          Put put) const {
    if (2 * p + 1 == dim) {
      put(dim - 1, to_float(row[dim - 1]));
      return;
    }
    const index_t i = halves ? p : 2 * p, j = halves ? p + dim / 2 : 2 * p + 1;
    const angle turn = column_score(p, positions);
    const float a = to_float(row[i]), b = to_float(row[j]);
    put(i, a * turn.cosine - b * turn.sine);
    put(j, b * turn.cosine + a * turn.sine);
  }
  /// Pairs of a row, an odd last element counted as one.
  KVFOLD_DEVICE static index_t pairs(index_t dim) { return (dim + 1) / 2; }
};

/// The rope_params of a `kvfold::rope`.
template <class Rope>
rope_params rope_params_of(const Rope& rope, index_t dim) {
  rope_params x;
  x.halves = rope.layout == decltype(rope.layout)::half_split;
  for (index_t p = 0; p < dim / 2 && p < max_dim / 2; ++p) {
    x.frequency[p] = rope.frequency(p, dim);
  }
  return x;
}

}  // namespace kvfold::cuda
