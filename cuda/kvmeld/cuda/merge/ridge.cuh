// SPDX-License-Identifier: MIT
/// Ridge: corrections of values by which rows come closer to the outputs that are wanted.
#pragma once

#include "kvmeld/cuda/merge/ridge_factor.cuh"
#include "kvmeld/cuda/merge/ridge_solution.cuh"

namespace kvmeld::cuda::detail {

/// What a ridge wants beside its system, whose rows P already has.
struct ridge_outputs {
  const float* missing;            ///< Y [heads, queries, dim]
  const float *squares, *largest;  ///< [heads, parts]: see `pack_outputs`
  index_t parts;
  const index_t* row;  ///< [heads, capacity] of each unknown
  index_t capacity;
  float* out;  ///< [heads, capacity, dim]: X in those rows, others stay as they are
};

/// `λ = ridge` times the trace of PᵀP. Three launches (of the dual five), and two for every 128
/// unknowns (or queries).
template <index_t Halves>
void solve_ridge(const ridge_system& of, const ridge_outputs& outputs, float ridge, unsigned heads,
                 stream stream) {
  using pack = pack_outputs<Halves>;
  launch(pack{of, outputs.missing, outputs.squares, outputs.largest, outputs.parts, ridge},
         {heads, of.dual ? 1 : blocks_of(of.depth, pack::queries)}, stream);
  if (of.dual) {
    launch(load_outputs{of, outputs.missing}, {heads, blocks_of(of.tiles), blocks_of(of.dim_tiles)},
           stream);
    using multiply = multiply_rows<Halves, true>;
    launch(multiply{of}, multiply::blocks(of, heads), stream);
  } else {
    using multiply = multiply_rows<Halves, false>;
    launch(multiply{of}, multiply::blocks(of, heads), stream);
  }
  for (index_t j = 0; j < of.tiles; ++j) {
    const auto tiles = static_cast<unsigned>(of.row_tiles() - j);
    launch(update_column{of, j}, {heads, tiles}, stream);
    launch(solve_column{of, j}, {heads, tiles - 1}, stream);
  }
  const index_t* const row = of.dual ? nullptr : outputs.row;
  launch(substitute_back{of, row, outputs.capacity, outputs.out},
         {heads, blocks_of(of.dim, substitute_back::columns)}, stream);
  if (of.dual) {
    launch(multiply_solution<Halves>{of, outputs.row, outputs.capacity, outputs.out},
           {heads, blocks_of(of.unknown_tiles), blocks_of(of.dim_tiles)}, stream);
  }
}

}  // namespace kvmeld::cuda::detail
