// SPDX-License-Identifier: MIT
/// Decode attention on tensor cores, for rows of 16-bit elements at multiples of 16 bytes.
#pragma once

#include "kvmeld/cuda/score/attention_call.cuh"
#include "kvmeld/cuda/score/warp_tile.cuh"

namespace kvmeld::cuda::detail {

/// A block attends its share of one head's slots for 16 query heads of the group. Its warps do not
/// wait for each other until the end: each has a ring of tiles of its own, 16 slots of K and of V,
/// one in flight while the other is multiplied. The slots (then the dims) take the 16 rows of the
/// tensor cores and the query heads the 8 columns, so that a group of up to 8 costs the same as
/// one:
///
///     logits [16 slots, 8 queries] = K [16, dim] · Qᵀ
///     outᵀ [16 dims, 8 queries]   += Vᵀ [16, 16 slots] · P
///
/// P goes in two 16-bit parts, what they round to and the rest, which is as good as float. K and V
/// are read once and need not stay in L2, so that the logits may. Up to `Depth` dims, `Eights` · 8
/// query heads. Reads 2 · dim · 2 + 4 bytes a slot, writes 4 · group of logits.
template <class Scalar, index_t Depth, index_t Eights, class Masses>
struct attend_tiles {
  static constexpr index_t warps = Depth > 128 ? 2 : 4, threads = 32 * warps;
  static constexpr index_t resident = Depth > 64 ? 3 : 5;
  static constexpr index_t stages = 2;         // tiles of a ring
  static constexpr index_t turn = 16 * warps;  // slots
  static constexpr index_t queries = 8 * Eights, pitch = Depth + 4;
  using rows = warp_tile<Scalar, Depth>;
  static constexpr index_t tile = rows::size;  // elements of K or V
  using tile_array = shared_array<Scalar, warps * stages * 2 * tile>;
  struct shared_memory {
    shared_union<tile_array, shared_array<float, warps * queries * pitch>> tiles;
    shared_array<float, warps * queries> max, sum;
  };

  attention_call<Scalar, Masses> call;
  index_t first_query = 0;  // of a launch's, where a group has more than it holds

  /// Grid: heads, splits.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    (*this)(shared, [] {});
  }
  /// `meanwhile()`: what there is to do while the first tiles are in flight.
  template <class Meanwhile>
  KVMELD_DEVICE void operator()(shared_memory& shared, Meanwhile meanwhile) const {
    let_next_start();
    const slot_share share = call.share(turn);
    const auto keys = call.cache.keys.of(share.head), values = call.cache.values.of(share.head);
    const index_t ring = warp() * stages * 2 * tile, first = share.begin + warp() * 16;
    const index_t end = share.end_in_cache();
    KVMELD_UNROLL
    for (index_t i = 0; i < stages - 1; ++i) {
      load(shared.tiles.first, ring + i * 2 * tile, keys, values, end, first + i * turn);
    }
    meanwhile();
    const index_t g0 = first_of_group();
    call.clear_ticket(share, g0);
    unsigned q[Eights][Depth / 16][2];
    load_queries(q);

    // A lane has query heads 2 (lane mod 4) and the next, of each eight.
    float out[Depth / 16][Eights][4] = {}, max[Eights][2], sum[Eights][2];
    unrolled<Eights, 2>([&](index_t t, index_t j) { max[t][j] = lowest_score, sum[t][j] = 0; });
    if (share.has_new() && warp() == 0) {
      attend_new_token<Depth, Eights>(call, share, g0, q, out, max, sum);
    }
    if (share.has_new() && warp() == 1 && g0 == 0) {
      call.append(share, true);
    }
    const auto mass_of = [&](index_t s0) {  // of a slot a lane
      const index_t s = s0 + lane() % 16;
      return s < end ? call.cache.log_mass_of(share.head)[s] : 0.0F;
    };
    float next_mass = mass_of(first);
    index_t stage = 0;
    for (index_t s0 = first; s0 < end; s0 += turn) {
      const float mass = next_mass;
      next_mass = mass_of(s0 + turn);
      const index_t free = stage == 0 ? stages - 1 : stage - 1;
      load(shared.tiles.first, ring + free * 2 * tile, keys, values, end, s0 + (stages - 1) * turn);
      wait_async<stages - 1>();
      sync_warp();  // every lane's part of the tile is there
      const index_t at = ring + stage * 2 * tile;
      float x[Eights][4] = {};
      multiply_keys(shared, at, q, x);
      make_logits(share, end, s0, mass, x);
      KVMELD_UNROLL
      for (index_t t = 0; t < Eights; ++t) {
        weigh(x[t], max[t], sum[t], t, out);
      }
      add_values(out, x, shared.tiles.first,
                 [&](index_t row, index_t pack) { return at + tile + rows::place(row, pack); });
      sync_warp();  // the tile may be overwritten
      stage = stage == stages - 1 ? 0 : stage + 1;
    }
    wait_async<0>();
    sync_block();
    write(shared, out, max, sum);
    sync_block();
    call.template combine_warps<warps, queries, pitch>(shared.max, shared.sum, shared.tiles.then,
                                                       share, g0);
  }

  /// Weights from logits, in place, by a new maximum. A lane's sum is of its own slots.
  KVMELD_DEVICE static void weigh(float (&x)[4], float (&max)[2], float (&sum)[2], index_t t,
                                  float (&out)[Depth / 16][Eights][4]) {
    float rescale[2];
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      float top = higher_of(max[j], higher_of(x[j], x[j + 2]));
      KVMELD_UNROLL
      for (index_t d = 4; d < 32; d *= 2) {
        top = higher_of(top, shuffle_xor(top, d));
      }
      rescale[j] = softmax_weight(max[j], top), max[j] = top;
      x[j] = softmax_weight(x[j], top), x[j + 2] = softmax_weight(x[j + 2], top);
      sum[j] = sum[j] * rescale[j] + x[j] + x[j + 2];
    }
    KVMELD_UNROLL
    for (index_t d = 0; d < Depth / 16; ++d) {
      KVMELD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        out[d][t][j] *= rescale[j % 2];
      }
    }
  }

  /// Adds the values of 16 slots by their weights `x`; 16 bytes of them lie at `place(row, pack)`.
  template <index_t N, class Place>
  KVMELD_DEVICE static void add_values(float (&out)[Depth / 16][Eights][4],
                                       const float (&x)[Eights][4],
                                       const shared_array<Scalar, N>& from, Place place) {
    unsigned p[Eights][2], rest[Eights][2];
    unrolled<Eights, 2>([&](index_t t, index_t j) {
      const Scalar a = from_float<Scalar>(x[t][2 * j]), b = from_float<Scalar>(x[t][2 * j + 1]);
      p[t][j] = transposed(pair_of(a, b));
      rest[t][j] = transposed(pair_of(from_float<Scalar>(x[t][2 * j] - to_float(a)),
                                      from_float<Scalar>(x[t][2 * j + 1] - to_float(b))));
    });
    KVMELD_UNROLL
    for (index_t d = 0; d < Depth / 16; ++d) {
      const auto a = load_matrices_transposed(
          from, place(lane() % 8 + lane() / 16 * 8, 2 * d + lane() / 8 % 2));
      KVMELD_UNROLL
      for (index_t t = 0; t < Eights; ++t) {
        mma_16x8x16<Scalar>(out[d][t], a.of, p[t]);
        mma_16x8x16<Scalar>(out[d][t], a.of, rest[t]);
      }
    }
  }

 private:
  KVMELD_DEVICE index_t first_of_group() const { return Eights > 1 ? first_query : 0; }

  /// Starts to copy K and V of 16 slots, zeros where there is none.
  KVMELD_DEVICE void load(tile_array& to, index_t at, const head_rows<Scalar>& keys,
                          const head_rows<Scalar>& values, index_t end, index_t s0) const {
    if (s0 < end) {
      rows::load(to, at, keys, call.cache.dim, end, s0);
      rows::load(to, at + tile, values, call.cache.dim, end, s0);
    }
    commit_async();  // an empty one too: groups are counted
  }

  /// The queries as the tensor cores' right side.
  KVMELD_DEVICE void load_queries(unsigned (&q)[Eights][Depth / 16][2]) const {
    unrolled<Eights, Depth / 16, 2>([&](index_t t, index_t d, index_t j) {
      const index_t g = first_of_group() + t * 8 + lane() / 4, i = d * 16 + j * 8 + lane() % 4 * 2;
      q[t][d][j] = g < call.cache.group && i < call.cache.dim ? load_pair(call.query(g) + i) : 0U;
    });
  }

  /// `x`: of slots lane / 4 (elements 0 and 1) and 8 further on.
  KVMELD_DEVICE static void multiply_keys(shared_memory& shared, index_t at,
                                          const unsigned (&q)[Eights][Depth / 16][2],
                                          float (&x)[Eights][4]) {
    KVMELD_UNROLL
    for (index_t d = 0; d < Depth / 16; ++d) {
      const auto a = rows::left(shared.tiles.first, at, d);
      KVMELD_UNROLL
      for (index_t t = 0; t < Eights; ++t) {
        mma_16x8x16<Scalar>(x[t], a.of, q[t][d]);
      }
    }
  }

  /// Logits from products, and what is observed of them into memory.
  KVMELD_DEVICE void make_logits(const slot_share& share, index_t end, index_t s0, float mass,
                                 float (&x)[Eights][4]) const {
    call.cap(x);
    const float masses[2] = {shuffle(mass, lane() / 4), shuffle(mass, lane() / 4 + 8)};
    KVMELD_UNROLL
    for (index_t t = 0; t < Eights; ++t) {
      KVMELD_UNROLL
      for (index_t j = 0; j < 2; ++j) {
        const index_t s = s0 + lane() / 4 + 8 * j, g = first_of_group() + t * 8 + lane() % 4 * 2;
        float observed[2] = {};
        KVMELD_UNROLL
        for (index_t i = 0; i < 2; ++i) {
          float& l = x[t][2 * j + i];
          l = s < end ? call.masses(call.cache, share.head, s, l, masses[j], observed[i])
                      : lowest_score;
        }
        if (call.to.logits != nullptr && s < end && g < call.cache.group) {
          float* const to = call.to.logits_of(call.cache, s) + g;
          if (call.cache.group % 2 == 0) {
            store_pair(to, observed[0], observed[1]);
          } else {
            to[0] = observed[0];
            if (g + 1 < call.cache.group) {
              to[1] = observed[1];
            }
          }
        }
      }
    }
  }

  /// A warp's attention into shared memory, where its tiles lay.
  KVMELD_DEVICE void write(shared_memory& shared, const float (&out)[Depth / 16][Eights][4],
                           const float (&max)[Eights][2], const float (&sum)[Eights][2]) const {
    KVMELD_UNROLL
    for (index_t t = 0; t < Eights; ++t) {
      KVMELD_UNROLL
      for (index_t j = 0; j < 2; ++j) {
        const index_t g = warp() * queries + t * 8 + lane() % 4 * 2 + j;
        float all = sum[t][j];
        KVMELD_UNROLL
        for (index_t d = 4; d < 32; d *= 2) {
          all += shuffle_xor(all, d);
        }
        if (lane() < 4) {
          shared.max[g] = max[t][j], shared.sum[g] = all;
        }
        KVMELD_UNROLL
        for (index_t d = 0; d < Depth / 16; ++d) {
          KVMELD_UNROLL
          for (index_t e = 0; e < 2; ++e) {
            shared.tiles.then[g * pitch + d * 16 + lane() / 4 + 8 * e] = out[d][t][j + 2 * e];
          }
        }
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
