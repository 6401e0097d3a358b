// SPDX-License-Identifier: MIT
/// Decode attention over latent rows on tensor cores, for rows of 16-bit elements.
#pragma once

#include "kvmeld/cuda/score/attend_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Rows whose first numbers are the values (MLA; DeepSeek-AI 2024, arXiv 2405.04434): a block
/// attends its share of one head's slots for 16 query heads, 16 slots at a time, one tile in flight
/// while the other is multiplied. A warp multiplies a quarter of the keys' numbers, and what the
/// four have meets in shared memory; then it adds up a quarter of the values' numbers, from the
/// same tile. Reads 2 · key_dim + 4 bytes a slot per 16 query heads.
template <class Scalar>
struct attend_latent_rows {
  static constexpr index_t key_depth = 576, value_depth = 512;  // at most
  static constexpr index_t warps = 4, threads = 32 * warps, eights = 2, queries = 8 * eights;
  static constexpr index_t steps = key_depth / 16 / warps, own = value_depth / warps;
  static constexpr index_t pitch = value_depth + 4;
  using rows = warp_tile<Scalar, key_depth>;
  using values = attend_tiles<Scalar, own, eights, log_masses>;
  struct shared_memory {
    shared_union<shared_array<Scalar, 2 * rows::size>, shared_array<float, queries * pitch>> tiles;
    shared_array<float, warps * eights * 4 * 32> products;  // a lane's of each warp
    shared_array<float, queries> max, sum;
  };

  attention_call<Scalar, log_masses> call;  // of the values' dim
  index_t key_dim;

  /// Grid: heads, splits, blocks of query heads.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    let_next_start();
    const slot_share share = call.share(16);
    const index_t g0 = block_z() * queries, group = call.cache.group;
    call.clear_ticket(share, g0);
    load(shared, 0, share, share.begin);
    unsigned q[eights][steps][2];
    unrolled<eights, steps, 2>([&](index_t t, index_t d, index_t j) {
      const index_t g = g0 + t * 8 + lane() / 4;
      const index_t i = (warp() * steps + d) * 16 + j * 8 + lane() % 4 * 2;
      const std::ptrdiff_t row = (std::ptrdiff_t{place_of_block()} * group + g) * key_dim;
      q[t][d][j] = g < group && i < key_dim ? load_pair(call.queries + row + i) : 0U;
    });
    float out[own / 16][eights][4] = {}, max[eights][2], sum[eights][2];
    unrolled<eights, 2>([&](index_t t, index_t j) { max[t][j] = lowest_score, sum[t][j] = 0; });
    index_t at = 0;
    for (index_t s0 = share.begin; s0 < share.end; s0 += 16, at = rows::size - at) {
      load(shared, rows::size - at, share, s0 + 16);
      wait_async<1>();
      sync_block();  // the tile is there
      float x[eights][4] = {};
      KVMELD_UNROLL
      for (index_t d = 0; d < steps; ++d) {
        const auto a = rows::left(shared.tiles.first, at, warp() * steps + d);
        KVMELD_UNROLL
        for (index_t t = 0; t < eights; ++t) {
          mma_16x8x16<Scalar>(x[t], a.of, q[t][d]);
        }
      }
      make_logits(shared, share, s0, x);
      KVMELD_UNROLL
      for (index_t t = 0; t < eights; ++t) {
        values::weigh(x[t], max[t], sum[t], t, out);
      }
      values::add_values(out, x, shared.tiles.first, [&](index_t row, index_t pack) {
        return at + rows::place(row, warp() * own / 8 + pack);
      });
      sync_block();  // the tile may be overwritten
    }
    wait_async<0>();
    sync_block();
    unrolled<eights, 2>([&](index_t t, index_t j) {
      const index_t g = t * 8 + lane() % 4 * 2 + j;
      float all = sum[t][j];
      KVMELD_UNROLL
      for (index_t d = 4; d < 32; d *= 2) {
        all += shuffle_xor(all, d);
      }
      if (warp() == 0 && lane() < 4) {
        shared.max[g] = max[t][j], shared.sum[g] = all;
      }
      unrolled<own / 16, 2>([&](index_t d, index_t e) {
        shared.tiles.then[g * pitch + warp() * own + d * 16 + lane() / 4 + 8 * e] =
            out[d][t][j + 2 * e];
      });
    });
    sync_block();
    call.template combine_warps<1, queries, pitch, threads>(shared.max, shared.sum,
                                                            shared.tiles.then, share, g0);
  }

 private:
  /// Starts to copy 16 slots, zeros where there is none.
  KVMELD_DEVICE void load(shared_memory& shared, index_t at, const slot_share& share,
                          index_t s0) const {
    const auto from = call.cache.keys.of(share.head);
    for (index_t e = thread_index(); s0 < share.end && e < 16 * rows::packs; e += threads) {
      const index_t r = e / rows::packs, pack = e % rows::packs;
      const bool is = s0 + r < share.end && pack * 8 < key_dim;
      copy_async(shared.tiles.first, at + rows::place(r, pack),
                 from.at(is ? s0 + r : s0) + (is ? pack * 8 : 0), is ? 16 : 0);
    }
    commit_async();
  }

  /// Logits of slots lane / 4 and 8 further on, in every warp, from the products of all.
  KVMELD_DEVICE void make_logits(shared_memory& shared, const slot_share& share, index_t s0,
                                 float (&x)[eights][4]) const {
    const auto place = [](index_t w, index_t t, index_t i) {
      return ((w * eights + t) * 4 + i) * 32 + lane();
    };
    unrolled<eights, 4>(
        [&](index_t t, index_t i) { shared.products[place(warp(), t, i)] = x[t][i]; });
    sync_block();
    unrolled<eights, 4>([&](index_t t, index_t i) {
      x[t][i] = 0;
      for (index_t w = 0; w < warps; ++w) {
        x[t][i] += shared.products[place(w, t, i)];
      }
    });
    call.cap(x);
    const auto masses = call.cache.log_mass_of(share.head);
    unrolled<eights, 4>([&](index_t t, index_t i) {
      const index_t s = s0 + lane() / 4 + i / 2 * 8;
      x[t][i] = s < share.end ? call.cache.scale * x[t][i] + masses[s] : lowest_score;
    });
  }
};

}  // namespace kvmeld::cuda::detail
