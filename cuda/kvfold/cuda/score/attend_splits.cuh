/// Decode attention with log-mass, split over the sequence: the first of a step's two launches.
#pragma once

#include "kvfold/cuda/memory/work_memory.cuh"
#include "kvfold/cuda/score/queries.cuh"

namespace kvfold::cuda {

/// One new token of every head that a call runs.
template <class Scalar>
struct new_tokens {
  const Scalar* keys = nullptr;    ///< [heads, dim]; null: none is appended
  const Scalar* values = nullptr;  ///< [heads, dim]
};

namespace detail {

/// A block attends `Heads` query heads of one KV head over its share of the slots. `lanes` lanes a
/// row, 16 bytes each (`Packs` times): for 128 halves half a warp, so that a warp's load is two
/// whole rows. A lane has `unroll` rows of K and of V on their way at once (128 bytes), keeps its
/// part of the queries and of the sums in registers, and K and V are read once for all `Heads`.
/// Groups of lanes keep maximum, sum and output of their own and meet at the end only.
/// Reads 2 · dim · sizeof(Scalar) + 4 bytes a slot, writes 4 · Heads of logits.
template <class Scalar, index_t Packs, index_t Heads, class Masses>
struct attend_slots {
  static constexpr index_t threads = 128;
  static constexpr index_t warps = threads / 32;
  static constexpr index_t unroll = 4 / Packs;
  static constexpr index_t width = vector_16<Scalar>::size;
  static constexpr index_t own = Packs * width;  // elements of a row in a lane
  struct shared_memory {
    shared_array<float, warps * Heads> max, sum;
    shared_array<float, warps * Heads * own * 32> out;
  };

  cache_view<Scalar> cache;
  const Scalar* queries;  // [heads, group, dim]
  new_tokens<Scalar> fresh;
  partial_attention to;
  Masses masses;
  index_t lanes;  // of a row, a power of two
  bool aligned;

  /// Grid: heads, splits, sweeps over the group.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const auto split = static_cast<index_t>(block_index().y);
    const index_t g0 = static_cast<index_t>(block_index().z) * Heads;
    if (split == 0 && g0 == 0 && thread_index() == 0) {
      to.tickets[h] = 0;  // for the next launch, whatever the workspace held
    }
    const index_t n = append(h, split);
    const index_t share = this->share(n);
    const index_t begin = split * share < n ? split * share : n;
    const index_t end = begin + share < n ? begin + share : n;
    const index_t first = lane() % lanes * width;
    const auto keys = cache.keys.of(h), values = cache.values.of(h);

    float q[Heads][own], out[Heads][own], max[Heads], sum[Heads];
    KVFOLD_UNROLL
    for (index_t g = 0; g < Heads; ++g) {
      max[g] = lowest_score, sum[g] = 0;
      KVFOLD_UNROLL
      for (index_t p = 0; p < Packs; ++p) {
        const Scalar* const row =
            queries + (std::ptrdiff_t{place_of_block()} * cache.group + g0 + g) * cache.dim;
        KVFOLD_UNROLL
        for (index_t j = 0; j < width; ++j) {
          const index_t i = first + p * lanes * width + j;
          q[g][p * width + j] = g0 + g < cache.group && i < cache.dim ? to_float(row[i]) : 0.0F;
          out[g][p * width + j] = 0;
        }
      }
    }

    const index_t rows = 32 / lanes;  // of a warp's load
    for (index_t base = begin; base < end; base += warps * rows * unroll) {
      vector_16<Scalar> k[unroll][Packs], v[unroll][Packs];
      float logit[unroll][Heads];
      KVFOLD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t s = base + (u * warps + warp()) * rows + lane() / lanes;
        KVFOLD_UNROLL
        for (index_t p = 0; p < Packs; ++p) {  // an empty load where there is no slot
          const index_t i = s < end ? first + p * lanes * width : cache.dim;
          k[u][p] = load_row(keys.at(s < end ? s : begin), i, cache.dim, aligned);
          v[u][p] = load_row(values.at(s < end ? s : begin), i, cache.dim, aligned);
        }
      }
      KVFOLD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t s = base + (u * warps + warp()) * rows + lane() / lanes;
        const float mass = s < end ? cache.log_mass[cache.slot(h, s)] : 0.0F;
        KVFOLD_UNROLL
        for (index_t g = 0; g < Heads; ++g) {
          float dot = 0;
          KVFOLD_UNROLL
          for (index_t p = 0; p < Packs; ++p) {
            KVFOLD_UNROLL
            for (index_t j = 0; j < width; ++j) {
              dot += q[g][p * width + j] * to_float(k[u][p][j]);
            }
          }
          dot = reduce_sum(dot, lanes);
          float observed = lowest_score;
          logit[u][g] = s < end ? masses(cache, h, s, dot, mass, observed) : lowest_score;
          if (to.logits != nullptr && s < end && g0 + g < cache.group &&
              lane() % lanes == g % lanes) {
            to.logits[cache.slot(h, s) * cache.group + g0 + g] = observed;
          }
        }
      }
      KVFOLD_UNROLL
      for (index_t g = 0; g < Heads; ++g) {
        float higher = max[g];
        KVFOLD_UNROLL
        for (index_t u = 0; u < unroll; ++u) {
          higher = logit[u][g] > higher ? logit[u][g] : higher;
        }
        const float rescale = weight(max[g], higher);
        max[g] = higher, sum[g] *= rescale;
        KVFOLD_UNROLL
        for (index_t j = 0; j < own; ++j) {
          out[g][j] *= rescale;
        }
        KVFOLD_UNROLL
        for (index_t u = 0; u < unroll; ++u) {
          const float e = weight(logit[u][g], higher);
          sum[g] += e;
          KVFOLD_UNROLL
          for (index_t p = 0; p < Packs; ++p) {
            KVFOLD_UNROLL
            for (index_t j = 0; j < width; ++j) {
              out[g][p * width + j] += e * to_float(v[u][p][j]);
            }
          }
        }
      }
    }
    merge(shared, h, split, g0, out, max, sum);
  }

  /// Slots for each split: whole turns of the block.
  KVFOLD_DEVICE index_t share(index_t n) const {
    const index_t turn = warps * (32 / lanes) * unroll;
    return ((n + to.splits - 1) / to.splits + turn - 1) / turn * turn;
  }

 private:
  /// exp(x − max), 0 where nothing was seen, NaN where something was NaN.
  KVFOLD_DEVICE static float weight(float x, float max) {
    return x == lowest_score ? 0.0F : exponential(x - max);
  }

  /// Appends the new token, by the block that attends it. Returns the slots then.
  KVFOLD_DEVICE index_t append(index_t h, index_t split) const {
    const index_t n = cache.length[h];
    if (fresh.keys == nullptr || n >= cache.capacity) {
      return n;
    }
    if (n / share(n + 1) == split) {
      Scalar* const key = cache.keys.of(h).at(n);
      Scalar* const value = cache.values.of(h).at(n);
      for (index_t i = thread_index(); i < cache.dim; i += threads) {
        key[i] = fresh.keys[std::ptrdiff_t{place_of_block()} * cache.dim + i];
        value[i] = fresh.values[std::ptrdiff_t{place_of_block()} * cache.dim + i];
      }
      if (thread_index() == 0) {
        cache.log_mass[cache.slot(h, n)] = 0;
        cache.position[cache.slot(h, n)] = cache.tokens_total[h];
      }
      sync_block();
    }
    return n + 1;
  }

  /// Groups of lanes, then warps, in a fixed order.
  KVFOLD_DEVICE void merge(shared_memory& shared, index_t h, index_t split, index_t g0,
                           float (&out)[Heads][own], float (&max)[Heads],
                           float (&sum)[Heads]) const {
    KVFOLD_UNROLL
    for (index_t g = 0; g < Heads; ++g) {
      for (index_t d = lanes; d < 32; d *= 2) {
        const float other = shuffle_xor(max[g], d), higher = other > max[g] ? other : max[g];
        const float mine = weight(max[g], higher), theirs = weight(other, higher);
        sum[g] = mine * sum[g] + theirs * shuffle_xor(sum[g], d);
        KVFOLD_UNROLL
        for (index_t j = 0; j < own; ++j) {
          out[g][j] = mine * out[g][j] + theirs * shuffle_xor(out[g][j], d);
        }
        max[g] = higher;
      }
      if (lane() < lanes) {
        KVFOLD_UNROLL
        for (index_t j = 0; j < own; ++j) {
          const index_t i = (j / width * lanes + lane()) * width + j % width;
          shared.out[(warp() * Heads + g) * own * 32 + i] = out[g][j];
        }
      }
      if (lane() == 0) {
        shared.max[warp() * Heads + g] = max[g];
        shared.sum[warp() * Heads + g] = sum[g];
      }
    }
    sync_block();
    const std::ptrdiff_t part = (std::ptrdiff_t{h} * to.splits + split) * cache.group + g0;
    for (index_t g = 0; g < Heads && g0 + g < cache.group; ++g) {
      float higher = lowest_score, scale[warps], total = 0;
      KVFOLD_UNROLL
      for (index_t w = 0; w < warps; ++w) {
        const float m = shared.max[w * Heads + g];
        higher = m > higher ? m : higher;
      }
      KVFOLD_UNROLL
      for (index_t w = 0; w < warps; ++w) {
        scale[w] = weight(shared.max[w * Heads + g], higher);
        total += scale[w] * shared.sum[w * Heads + g];
      }
      if (thread_index() == 0) {
        to.max[part + g] = higher, to.sum[part + g] = total;
      }
      for (index_t i = thread_index(); i < cache.dim; i += threads) {
        float x = 0;
        KVFOLD_UNROLL
        for (index_t w = 0; w < warps; ++w) {
          x += scale[w] * shared.out[(w * Heads + g) * own * 32 + i];
        }
        to.out[(part + g) * cache.dim + i] = x;
      }
    }
  }
};

/// The lanes that share a row, `Packs` loads of 16 bytes each.
template <class Scalar>
index_t lanes_of(index_t dim, index_t packs) {
  const index_t loads =
      (dim + packs * vector_16<Scalar>::size - 1) / (packs * vector_16<Scalar>::size);
  index_t lanes = 1;
  while (lanes < loads) {
    lanes *= 2;
  }
  return lanes;
}

template <class Scalar, index_t Packs, index_t Heads, class Masses>
void attend_sweeps(const Masses& masses, const cache_view<Scalar>& cache, const Scalar* queries,
                   const new_tokens<Scalar>& fresh, const partial_attention& to, stream stream) {
  const auto sweeps = static_cast<unsigned>((cache.group + Heads - 1) / Heads);
  launch(
      attend_slots<Scalar, Packs, Heads, Masses>{
          cache, queries, fresh, to, masses, lanes_of<Scalar>(cache.dim, Packs), cache.aligned()},
      {cache.blocks(), static_cast<unsigned>(to.splits), sweeps}, stream);
}

/// At most 8 query heads a sweep: a group of 9 to 16 reads K and V twice, the second time from L2
/// for the most part.
template <class Scalar, index_t Packs, class Masses>
void attend_group(const Masses& masses, const cache_view<Scalar>& cache, const Scalar* queries,
                  const new_tokens<Scalar>& fresh, const partial_attention& to, stream stream) {
  if (cache.group == 1) {
    attend_sweeps<Scalar, Packs, 1>(masses, cache, queries, fresh, to, stream);
  } else if (cache.group == 2) {
    attend_sweeps<Scalar, Packs, 2>(masses, cache, queries, fresh, to, stream);
  } else if (cache.group <= 4) {
    attend_sweeps<Scalar, Packs, 4>(masses, cache, queries, fresh, to, stream);
  } else {
    attend_sweeps<Scalar, Packs, 8>(masses, cache, queries, fresh, to, stream);
  }
}

template <class Scalar, class Masses>
void attend_splits(const Masses& masses, const cache_view<Scalar>& cache, const Scalar* queries,
                   const new_tokens<Scalar>& fresh, const partial_attention& to, stream stream) {
  if constexpr (sizeof(Scalar) == 4) {
    if (cache.dim > 128) {
      return attend_group<Scalar, 2>(masses, cache, queries, fresh, to, stream);
    }
  }
  attend_group<Scalar, 1>(masses, cache, queries, fresh, to, stream);
}

}  // namespace detail

}  // namespace kvfold::cuda
