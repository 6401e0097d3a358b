// SPDX-License-Identifier: MIT
/// A step's search among all slots: tiles of them, each read once by a block.
#pragma once

#include "kvmeld/cuda/memory/work_memory.cuh"

namespace kvmeld::cuda::detail {

/// Rows that a warp reads at once: `lanes` lanes share one, and every such group has several.
struct tile_rows {
  static constexpr index_t many = 4;

  index_t base, end;  ///< of the warp's; of the tile
  index_t lanes;

  KVMELD_DEVICE index_t slot(index_t u) const { return base + u * (32 / lanes) + lane() / lanes; }
};

/// `use(rows)` for all rows of a tile, by a block.
template <class Scalar, index_t Threads, class Use>
KVMELD_DEVICE void sweep_tile(const slot_tile& tile, index_t dim, Use use) {
  index_t lanes = 1;
  while (lanes < 32 && lanes * vector_16<Scalar>::size < dim) {
    lanes *= 2;
  }
  const index_t at_once = 32 / lanes * tile_rows::many;
  for (index_t base = tile.begin + warp() * at_once; base < tile.end;
       base += Threads / 32 * at_once) {
    use(tile_rows{base, tile.end, lanes});
  }
}

/// Cosines of row `with` and each of `rows`; 0 when either is zero. All lanes of a warp.
template <class Scalar>
KVMELD_DEVICE void cosines(const head_rows<Scalar>& of, index_t with, const tile_rows& rows,
                           index_t dim, bool aligned, float (&cosine)[tile_rows::many]) {
  constexpr index_t width = vector_16<Scalar>::size, many = tile_rows::many;
  float dot[many] = {}, square[many] = {}, own = 0;
  for (index_t i = lane() % rows.lanes * width; i < dim; i += rows.lanes * width) {
    const auto x = load_row(of.at(with), i, dim, aligned);
    vector_16<Scalar> y[many];
    KVMELD_UNROLL
    for (index_t u = 0; u < many; ++u) {
      const index_t s = rows.slot(u);
      y[u] = load_row(of.at(s < rows.end ? s : with), i, dim, aligned);
    }
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      const float a = to_float(x[j]);
      own += a * a;
      KVMELD_UNROLL
      for (index_t u = 0; u < many; ++u) {
        const float b = to_float(y[u][j]);
        dot[u] += a * b, square[u] += b * b;
      }
    }
  }
  own = square_root(reduce_sum(own, rows.lanes));
  KVMELD_UNROLL
  for (index_t u = 0; u < many; ++u) {
    const float norms = own * square_root(reduce_sum(square[u], rows.lanes));
    const float ab = reduce_sum(dot[u], rows.lanes);
    cosine[u] = norms > 0 ? ab / norms : 0.0F;
  }
}

}  // namespace kvmeld::cuda::detail
