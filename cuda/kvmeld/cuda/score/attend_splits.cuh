// SPDX-License-Identifier: MIT
/// Decode attention with log-mass, split over the sequence: the first launch of a step.
#pragma once

#include "kvmeld/cuda/score/attend_tiles.cuh"
#include "kvmeld/cuda/score/attention_call.cuh"

namespace kvmeld::cuda::detail {

/// A block attends its share of one head's slots for `Heads` of its query heads. `lanes` lanes a
/// row, 16 bytes each (`Packs` times); a lane has `unroll` rows of K and of V in flight at once,
/// and its part of the queries and of the sums in registers. Groups of lanes keep maximum, sum and
/// output of their own and meet at the end only. K and V are read once for every `Heads` query
/// heads.
template <class Scalar, index_t Packs, index_t Heads, class Masses>
struct attend_rows {
  static constexpr index_t threads = 128, warps = threads / 32;
  static constexpr index_t resident = narrow_rows<Scalar> ? 3 : 0;  // 0: as many as there are
  static constexpr index_t unroll = 4 / Packs;
  static constexpr index_t width = vector_16<Scalar>::size;
  static constexpr index_t own = Packs * width;  // elements of a row in a lane
  static constexpr index_t pitch = own * 32;
  struct shared_memory {
    shared_array<float, warps * Heads> max, sum;
    shared_array<float, warps * Heads * pitch> out;
  };

  attention_call<Scalar, Masses> call;
  index_t lanes;  // of a row, a power of two
  bool aligned;

  /// Grid: heads, splits, sweeps over the group.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    let_next_start();
    const cache_view<Scalar>& cache = call.cache;
    const index_t rows = 32 / lanes;  // of a warp's load
    const slot_share share = call.share(warps * rows * unroll);
    const index_t h = share.head, g0 = block_z() * Heads;
    call.clear_ticket(share, g0);
    const index_t first = lane() % lanes * width;
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    [[maybe_unused]] row_vector<Scalar> new_key, new_value;
    if constexpr (narrow_rows<Scalar>) {
      static_assert(Packs == 1);
      if (share.has_new()) {
        new_key = call.rounded_new(call.fresh.keys, first);
        new_value = call.rounded_new(call.fresh.values, first);
        if (g0 == 0 && warp() == 0 && lane() < lanes) {
          store_row(keys.at(share.cached), first, cache.dim, aligned, new_key);
          store_row(values.at(share.cached), first, cache.dim, aligned, new_value);
        }
      }
    } else if (g0 == 0 && share.has_new() && warp() == 0) {
      call.append(share, aligned);
    }
    float q[Heads][own], out[Heads][own] = {}, max[Heads], sum[Heads];
    KVMELD_UNROLL
    for (index_t g = 0; g < Heads; ++g) {
      max[g] = lowest_score, sum[g] = 0;
      KVMELD_UNROLL
      for (index_t j = 0; j < own; ++j) {
        const index_t i = first + j / width * lanes * width + j % width;
        q[g][j] = g0 + g < cache.group && i < cache.dim ? to_float(call.query(g0 + g)[i]) : 0.0F;
      }
    }

    for (index_t base = share.begin; base < share.end; base += warps * rows * unroll) {
      row_vector<Scalar> k[unroll][Packs], v[unroll][Packs];
      float logit[unroll][Heads];
      KVMELD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t s = base + (u * warps + warp()) * rows + lane() / lanes;
        const index_t at = s < share.end ? s : share.begin;
        KVMELD_UNROLL
        for (index_t p = 0; p < Packs; ++p) {  // an empty load where there is no slot
          const index_t i = s < share.end ? first + p * lanes * width : cache.dim;
          if constexpr (narrow_rows<Scalar>) {
            const bool is_new = at >= share.cached;
            k[u][p] = is_new ? new_key : load_row(keys.at(at), i, cache.dim, aligned);
            v[u][p] = is_new ? new_value : load_row(values.at(at), i, cache.dim, aligned);
          } else {
            k[u][p] = load_row(row(keys, call.fresh.keys, share, at), i, cache.dim, aligned);
            v[u][p] = load_row(row(values, call.fresh.values, share, at), i, cache.dim, aligned);
          }
        }
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t s = base + (u * warps + warp()) * rows + lane() / lanes;
        const float mass = s < share.cached && s < share.end ? cache.log_mass_of(h)[s] : 0.0F;
        float dot[Heads] = {};
        KVMELD_UNROLL
        for (index_t g = 0; g < Heads; ++g) {
          KVMELD_UNROLL
          for (index_t j = 0; j < own; ++j) {
            dot[g] += q[g][j] * to_float(k[u][j / width][j % width]);
          }
          dot[g] = reduce_sum(dot[g], lanes);
        }
        call.cap(dot);
        KVMELD_UNROLL
        for (index_t g = 0; g < Heads; ++g) {
          float observed = lowest_score;
          logit[u][g] =
              s < share.end ? call.masses(cache, h, s, dot[g], mass, observed) : lowest_score;
          if (call.to.logits != nullptr && s < share.end && g0 + g < cache.group &&
              lane() % lanes == g % lanes) {
            call.to.logits_of(cache, s)[g0 + g] = observed;
          }
        }
      }
      KVMELD_UNROLL
      for (index_t g = 0; g < Heads; ++g) {
        float top = max[g];
        KVMELD_UNROLL
        for (index_t u = 0; u < unroll; ++u) {
          top = higher_of(top, logit[u][g]);
        }
        const float rescale = softmax_weight(max[g], top);
        max[g] = top, sum[g] *= rescale;
        KVMELD_UNROLL
        for (index_t j = 0; j < own; ++j) {
          out[g][j] *= rescale;
        }
        KVMELD_UNROLL
        for (index_t u = 0; u < unroll; ++u) {
          const float e = softmax_weight(logit[u][g], top);
          sum[g] += e;
          KVMELD_UNROLL
          for (index_t j = 0; j < own; ++j) {
            out[g][j] += e * to_float(v[u][j / width][j % width]);
          }
        }
      }
    }
    write(shared, out, max, sum);
    sync_block();
    call.template combine_warps<warps, Heads, pitch>(shared.max, shared.sum, shared.out, share, g0);
  }

 private:
  /// Row `s` of a plane. The new token's is read where it comes from: no barrier stands between its
  /// way into the cache and its attention.
  KVMELD_DEVICE const Scalar* row(const head_rows<Scalar>& rows, const Scalar* new_rows,
                                  const slot_share& share, index_t s) const {
    return s >= share.cached ? new_rows + std::ptrdiff_t{place_of_block()} * call.cache.dim
                             : rows.at(s);
  }

  /// A warp's attention into shared memory, its groups of lanes in a fixed order.
  KVMELD_DEVICE void write(shared_memory& shared, float (&out)[Heads][own], float (&max)[Heads],
                           float (&sum)[Heads]) const {
    KVMELD_UNROLL
    for (index_t g = 0; g < Heads; ++g) {
      for (index_t d = lanes; d < 32; d *= 2) {
        const float top = higher_of(max[g], shuffle_xor(max[g], d));
        const float mine = softmax_weight(max[g], top);
        const float theirs = shuffle_xor(mine, d);
        sum[g] = mine * sum[g] + theirs * shuffle_xor(sum[g], d);
        KVMELD_UNROLL
        for (index_t j = 0; j < own; ++j) {
          out[g][j] = mine * out[g][j] + theirs * shuffle_xor(out[g][j], d);
        }
        max[g] = top;
      }
      if (lane() < lanes) {
        KVMELD_UNROLL
        for (index_t j = 0; j < own; ++j) {
          const index_t i = (j / width * lanes + lane()) * width + j % width;
          shared.out[(warp() * Heads + g) * pitch + i] = out[g][j];
        }
      }
      if (lane() == 0) {
        shared.max[warp() * Heads + g] = max[g], shared.sum[warp() * Heads + g] = sum[g];
      }
    }
  }
};

/// The lanes that share a row, `packs` loads of 16 bytes each.
template <class Scalar>
index_t lanes_of(index_t dim, index_t packs) {
  const index_t each = packs * vector_16<Scalar>::size;
  index_t lanes = 1;
  while (lanes * each < dim) {
    lanes *= 2;
  }
  return lanes;
}

/// Do all rows begin at multiples of 16 bytes, a new token's too, which lie one behind another?
/// Narrow rows' tokens are read number by number.
template <class Scalar, class Masses>
bool rows_aligned(const attention_call<Scalar, Masses>& call) {
  const auto fits = [&](const void* first) {
    return first == nullptr || (call.cache.dim % vector_16<Scalar>::size == 0 &&
                                reinterpret_cast<std::uintptr_t>(first) % 16 == 0);
  };
  return call.cache.aligned() &&
         (narrow_rows<Scalar> || (fits(call.fresh.keys) && fits(call.fresh.values)));
}

/// Can the tensor cores take these rows?
template <class Scalar, class Masses>
bool fits_tiles(const attention_call<Scalar, Masses>& call) {
  return sizeof(Scalar) == 2 && call.cache.dim % 8 == 0 && rows_aligned(call) &&
         reinterpret_cast<std::uintptr_t>(call.queries) % 4 == 0;
}

template <class Scalar, class Masses>
void attend_on_tiles(const attention_call<Scalar, Masses>& call, stream stream) {
  const extent blocks{call.cache.blocks(), blocks_of(call.to.splits)};
  with_depth<64, 128, 256>(call.cache.dim, [&](auto depth) {
    if (call.cache.group <= 8) {
      launch(attend_tiles<Scalar, decltype(depth)::value, 1, Masses>{call}, blocks, stream);
      return;
    }
    for (index_t g = 0; g < call.cache.group; g += group_block) {
      launch(attend_tiles<Scalar, decltype(depth)::value, 2, Masses>{call, g}, blocks, stream);
    }
  });
}

template <index_t Packs, index_t Heads, class Scalar, class Masses>
void attend_sweeps(const attention_call<Scalar, Masses>& call, stream stream) {
  const auto sweeps = blocks_of(call.cache.group, Heads);
  const index_t lanes = lanes_of<Scalar>(padded<Scalar>(call.cache.dim), Packs);
  launch(attend_rows<Scalar, Packs, Heads, Masses>{call, lanes, rows_aligned(call)},
         {call.cache.blocks(), blocks_of(call.to.splits), sweeps}, stream);
}

template <class Scalar, class Masses>
void attend_splits(const attention_call<Scalar, Masses>& call, stream stream) {
  if constexpr (sizeof(Scalar) == 2) {
    if (fits_tiles(call)) {
      return attend_on_tiles(call, stream);
    }
  } else if constexpr (!narrow_rows<Scalar>) {
    if (call.cache.dim > 128) {
      return attend_sweeps<2, 4>(call, stream);
    }
  }
  attend_sweeps<1, narrow_rows<Scalar> ? 2 : 4>(call, stream);
}

}  // namespace kvmeld::cuda::detail
