/// Weighted k-means of a head's slots, in a space of keys and values: centres, and the nearest
/// of each slot.
#pragma once

#include "kvfold/cuda/device/block_sort.cuh"
#include "kvfold/cuda/memory/plan_memory.cuh"
#include "kvfold/cuda/search/match.cuh"

namespace kvfold::cuda::detail {

/// The space that a prompt's clusters are made in: squared distance is
/// `δkᵀ M δk + ν ‖δv‖²`.
struct cluster_space {
  float* metric;   ///< M [heads, dim, dim], symmetric
  float* inverse;  ///< ν [heads]
  float* square;   ///< [heads, capacity]
  float* weight;   ///< [heads, capacity] weight of a slot
};

/// Centres `[heads, most, pitch]`: `M k`, `ν v`, and half of their square.
struct centre_rows {
  float *key, *value;
  float* half;  ///< [heads, most]
  index_t most, pitch;

  KVFOLD_DEVICE std::ptrdiff_t at(index_t h, index_t c) const {
    return (std::ptrdiff_t{h} * most + c) * pitch;
  }
};

/// The means of slots' keys and values as centres: `M k̄`, `v̄ ν` and half of the square, so that the
/// largest `k·(M k̄) + v·(v̄ ν) − half` is that of the nearest. A warp a centre. A centre
/// without members stays where it is.
template <class Scalar>
struct mean_centres {
  static constexpr index_t threads = 256;
  struct shared_memory {
    shared_array<float, threads / 32 * max_dim> key;
  };

  cache_view<Scalar> cache;
  cluster_space space;
  const index_t* planned;  // [heads]
  slot_lists members;      // those of a centre together
  const index_t* begin;    // [heads, capacity + 1] centre → its first; null: each is one slot
  const index_t* count;    // [heads] of centres
  centre_rows to;

  /// Grid: heads, any number of blocks that share the centres.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (planned[h] < 0) {
      return;
    }
    each_by_warp<threads>(count[h], [&](index_t c) {
      const index_t* const first = begin == nullptr ? nullptr : begin + cache.bound(h, c);
      const index_t from = first == nullptr ? c : first[0];
      const index_t end = first == nullptr ? c + 1 : first[1];
      if (from < end) {
        place(shared, h, c, members.slots + cache.slot(h, from), end - from);
      }
    });
  }

 private:
  KVFOLD_DEVICE void place(shared_memory& shared, index_t h, index_t c, const index_t* slots,
                           index_t size) const {
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    const auto weight = [&](index_t e) {
      return size == 1 ? 1.0F : space.weight[cache.slot(h, slots[e])];
    };
    const index_t own = warp() * max_dim;
    float total = 0, half = 0;
    for (index_t e = 0; e < size; ++e) {
      total += weight(e);
    }
    float* const value = to.value + to.at(h, c);
    for (index_t i = lane(); i < cache.dim; i += 32) {
      float k = 0, v = 0;
      for (index_t e = 0; e < size; ++e) {
        const float w = weight(e);
        k += w * to_float(keys.at(slots[e])[i]), v += w * to_float(values.at(slots[e])[i]);
      }
      k /= total, v /= total;
      shared.key[own + i] = k;
      value[i] = v * space.inverse[h];
      half += 0.5F * v * v * space.inverse[h];
    }
    sync_warp();
    const float* const metric = space.metric + std::ptrdiff_t{h} * cache.dim * cache.dim;
    for (index_t i = lane(); i < cache.dim; i += 32) {
      float y = 0;
      for (index_t j = 0; j < cache.dim; ++j) {
        y += metric[std::ptrdiff_t{j} * cache.dim + i] * shared.key[own + j];
      }
      to.key[to.at(h, c) + i] = y;
      half += 0.5F * y * shared.key[own + i];
    }
    half = reduce_sum(half);
    if (lane() == 0) {
      to.half[std::ptrdiff_t{h} * to.most + c] = half;
    }
    sync_warp();  // the key is used up
  }
};

/// The tile loop of `match` between slots and centres, in float: for every slot of a list the
/// nearest centre, ties to the lower one, and `x·c − half` of it.
template <class Scalar, index_t Depth>
struct nearest_centre {
  using shape = tile_shape<float, Depth>;
  static constexpr index_t threads = shape::threads;
  struct shared_memory {
    typename shape::row_array rows;
    typename shape::column_array centres;
    shared_array<float, shape::columns> half;
  };

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  slot_lists rows;
  const index_t* count;  // [heads] of centres
  centre_rows centres;
  matches out;
  bool aligned;

  /// Grid: heads, tiles of slots.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t e0 = static_cast<index_t>(block_index().y) * shape::rows;
    if (planned[h] < 0 || e0 >= rows.count[h]) {
      return;
    }
    const index_t size = rows.count[h], all = count[h];
    const index_t* const slots = rows.slots + cache.slot(h, 0);
    candidate best[shape::row_tiles][2] = {};
    for (index_t c0 = 0; c0 < all; c0 += shape::columns) {
      typename shape::products x;
      shape::clear(x);
      for (index_t part = 0; part < 2; ++part) {
        const auto of = part == 0 ? cache.keys.of(h) : cache.values.of(h);
        const float* const from = part == 0 ? centres.key : centres.value;
        sync_block();  // the last tiles are used up
        shape::template load<shape::rows>(
            shared.rows, [&](index_t r) { return e0 + r < size ? of.at(slots[e0 + r]) : nullptr; },
            of.data, cache.dim, aligned);
        shape::template load<shape::columns>(
            shared.centres,
            [&](index_t c) { return c0 + c < all ? from + centres.at(h, c0 + c) : nullptr; }, from,
            cache.dim, true);
        for (index_t c = thread_index(); part == 0 && c < shape::columns; c += threads) {
          shared.half[c] =
              c0 + c < all ? centres.half[std::ptrdiff_t{h} * centres.most + c0 + c] : 0.0F;
        }
        commit_async();
        wait_async<0>();
        sync_block();
        shape::accumulate(shared.rows, shared.centres, cache.dim, x);
      }
      KVFOLD_UNROLL
      for (index_t c = 0; c < shape::column_tiles; ++c) {
        KVFOLD_UNROLL
        for (index_t j = 0; j < 4; ++j) {
          const index_t column = shape::column(c, j);
          const float half = shared.half[column];
          KVFOLD_UNROLL
          for (index_t m = 0; m < shape::row_tiles; ++m) {
            const candidate it = c0 + column < all
                                     ? most_candidate(ordered(x[m][c][j] - half), c0 + column)
                                     : candidate{0};
            candidate& most = best[m][j / 2];
            most = it > most ? it : most;
          }
        }
      }
    }
    write_matches<shape>(out, cache, h, e0, size, best);
  }
};

/// The slots of a list with those of a centre together, in the order they came in. A block a head.
template <class Scalar>
struct group_members {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
  };

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  slot_lists rows;
  const index_t* into;                // [heads, capacity] by place in the list: a centre
  const index_t* count;               // [heads] of centres
  index_t *members, *spare, *centre;  // [heads, capacity]; centre: by slot
  index_t* begin;                     // [heads, capacity + 1]

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (planned[h] < 0) {
      return;
    }
    const index_t size = rows.count[h], all = count[h];
    index_t* const to = members + cache.slot(h, 0);
    index_t* const of = centre + cache.slot(h, 0);
    for (index_t e = thread_index(); e < size; e += threads) {
      const index_t s = rows.slots[cache.slot(h, e)];
      to[e] = s, of[s] = into[cache.slot(h, e)];
    }
    const index_t* const sorted =
        block_sort(shared.sort, to, spare + cache.slot(h, 0), size, static_cast<unsigned>(all),
                   [&](index_t s) { return static_cast<unsigned>(of[s]); });
    index_t* const first = begin + cache.bound(h, 0);
    for (index_t e = thread_index(); e <= size; e += threads) {
      const index_t before = e == 0 ? -1 : of[sorted[e - 1]], own = e == size ? all : of[sorted[e]];
      for (index_t c = before + 1; c <= own; ++c) {
        first[c] = e;
      }
      if (e < size) {
        to[e] = sorted[e];
      }
    }
  }
};

}  // namespace kvfold::cuda::detail
