/// The nearest kept slot of every removed one.
#pragma once

#include <cstddef>  // std::size_t

#include "kvfold/cuda/device/block_collectives.cuh"
#include "kvfold/cuda/memory/lists.cuh"
#include "kvfold/cuda/memory/tile.cuh"
#include "kvfold/cuda/memory/workspace.cuh"

namespace kvfold::cuda {

/// Similarities of keys a and b from their products: `a·b`, `a·a`, `b·b`. More is nearer.
struct dot_similarity {
  static constexpr bool norms = false;
  KVFOLD_HD float operator()(float ab, float, float) const { return ab; }
};
/// 0 when either is zero.
struct cosine_similarity {
  static constexpr bool norms = true;
  KVFOLD_DEVICE float operator()(float ab, float aa, float bb) const {
    const float both = square_root(aa) * square_root(bb);
    return both > 0 ? ab / both : 0.0F;
  }
};
/// −|a − b|²
struct euclidean_similarity {
  static constexpr bool norms = true;
  KVFOLD_HD float operator()(float ab, float aa, float bb) const { return 2 * ab - (aa + bb); }
};

/// What a similarity may need of a key beside its products.
struct key_facts {
  float square;  ///< k·k
  float mass;
  index_t slot;  ///< −1: none
};

/// −Ward's cost of making one of two, `m_a m_b / (m_a + m_b) · |a − b|²`; NaN costs most.
struct ward_similarity {
  static constexpr bool norms = true;
  static constexpr float no_cost = 3.402823466e38F;

  const float* mass;   ///< [heads, capacity]
  bool among = false;  ///< only slots of no less mass, and none its own: within one list

  KVFOLD_DEVICE bool allows(const key_facts& a, const key_facts& b) const {
    return !among || (a.slot != b.slot && !(rank(b.mass) < rank(a.mass)));
  }
  KVFOLD_DEVICE float operator()(float ab, const key_facts& a, const key_facts& b) const {
    const float apart = b.square + a.square - 2 * ab;
    const float cost = a.mass * b.mass / (a.mass + b.mass) * (apart < 0 ? 0.0F : apart);
    return cost < no_cost ? -cost : -no_cost;
  }
};

namespace detail {

/// Does a similarity need masses?
template <class Similarity>
inline constexpr bool weighs = requires(const Similarity& s) {
  s.mass;
};

/// `b` as a candidate for `a`; 0: it is none.
template <class Similarity>
KVFOLD_DEVICE candidate compared(const Similarity& similarity, float ab, const key_facts& a,
                                 const key_facts& b) {
  if (b.slot < 0) {
    return 0;
  }
  if constexpr (weighs<Similarity>) {
    return similarity.allows(a, b) ? most_candidate(ordered(similarity(ab, a, b)), b.slot)
                                   : candidate{0};
  } else {
    return most_candidate(ordered(similarity(ab, a.square, b.square)), b.slot);
  }
}

/// What a tile's rows, from place `e0` of a list of `count` on, are nearest to, when each lane
/// knows the best of its own columns: `best`, of the rows that `Shape` gives the lane.
template <class Shape, class Scalar>
KVFOLD_DEVICE void write_matches(const matches& out, const cache_view<Scalar>& cache, index_t h,
                                 index_t e0, index_t count,
                                 const candidate (&best)[Shape::row_tiles][2]) {
  KVFOLD_UNROLL
  for (index_t m = 0; m < Shape::row_tiles; ++m) {
    KVFOLD_UNROLL
    for (index_t i = 0; i < 2; ++i) {
      const candidate most = reduce_max(best[m][i], 4);
      const index_t e = e0 + Shape::row(m, 2 * i);
      if (lane() % 4 == 0 && e < count) {
        out.into[cache.slot(h, e)] = most_slot(most);
        out.similarity[cache.slot(h, e)] =
            most == 0 ? 0.0F : number_of(static_cast<unsigned>(most >> 32));
      }
    }
  }
}

/// `k·k` of every slot in use: a warp a row, in the order of lanes.
template <class Scalar>
struct squared_norms {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  float* norm;  // [heads, capacity]
  bool aligned;

  /// Grid: heads, stretches of 256 slots.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t begin = static_cast<index_t>(block_index().y) * 256, n = cache.length[h];
    const auto keys = cache.keys.of(h);
    for (index_t s = begin + warp(); s < n && s < begin + 256; s += threads / 32) {
      const float square = square_of(keys.at(s), cache.dim, aligned);
      if (lane() == 0) {
        norm[cache.slot(h, s)] = square;
      }
    }
  }
};

/// A block holds a tile of removed keys and streams the kept ones past it, two tiles in turn; every
/// lane keeps the best of its own columns, so the product is never stored. Ties go to the lower
/// slot, whatever the order of the lists.
template <class Scalar, index_t Depth, class Similarity>
struct nearest_kept {
  using shape = tile_shape<Scalar, Depth>;
  static constexpr index_t threads = shape::threads;
  struct shared_memory {
    typename shape::row_array removed;
    typename shape::column_array kept[2];
    shared_array<index_t, shape::columns> slot[2];  // −1: none
    shared_array<float, shape::columns> norm[2], mass[2];
  };

  cache_view<Scalar> cache;
  slot_lists removed, kept;
  const float* norm;  // [heads, capacity], or null: not needed
  matches out;
  Similarity similarity;
  bool aligned;

  /// Grid: heads, tiles of removed slots.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t e0 = static_cast<index_t>(block_index().y) * shape::rows;
    const index_t count = removed.count[h], candidates = kept.count[h];
    if (e0 >= count) {
      return;
    }
    const index_t* const away = removed.slots + cache.slot(h, 0);
    const index_t* const stay = kept.slots + cache.slot(h, 0);
    const auto keys = cache.keys.of(h);
    shape::template load<shape::rows>(
        shared.removed, [&](index_t r) { return e0 + r < count ? keys.at(away[e0 + r]) : nullptr; },
        cache.keys.data, cache.dim, aligned);
    commit_async();
    const auto facts_of = [&](index_t s) {
      key_facts x{0, 0, s};
      if (Similarity::norms && s >= 0) {
        x.square = norm[cache.slot(h, s)];
      }
      if constexpr (weighs<Similarity>) {
        x.mass = s < 0 ? 0.0F : similarity.mass[cache.slot(h, s)];
      }
      return x;
    };
    key_facts own[shape::row_tiles][2];
    candidate best[shape::row_tiles][2];
    KVFOLD_UNROLL
    for (index_t m = 0; m < shape::row_tiles; ++m) {
      KVFOLD_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        const index_t e = e0 + shape::row(m, 2 * i);
        own[m][i] = facts_of(e < count ? away[e] : -1);
        best[m][i] = 0;
      }
    }
    const auto load = [&](index_t c0, index_t turn) {
      if (c0 < candidates) {
        shape::template load<shape::columns>(
            shared.kept[turn],
            [&](index_t c) { return c0 + c < candidates ? keys.at(stay[c0 + c]) : nullptr; },
            cache.keys.data, cache.dim, aligned);
        for (index_t c = thread_index(); c < shape::columns; c += threads) {
          const key_facts x = facts_of(c0 + c < candidates ? stay[c0 + c] : -1);
          shared.slot[turn][c] = x.slot, shared.norm[turn][c] = x.square;
          shared.mass[turn][c] = x.mass;
        }
      }
      commit_async();
    };
    load(0, 0);
    for (index_t c0 = 0, turn = 0; c0 < candidates; c0 += shape::columns, turn ^= 1) {
      load(c0 + shape::columns, turn ^ 1);
      wait_async<1>();
      sync_block();
      typename shape::products x;
      shape::multiply(shared.removed, shared.kept[turn], cache.dim, x);
      KVFOLD_UNROLL
      for (index_t c = 0; c < shape::column_tiles; ++c) {
        KVFOLD_UNROLL
        for (index_t j = 0; j < 4; ++j) {
          const index_t column = shape::column(c, j);
          const key_facts other{shared.norm[turn][column], shared.mass[turn][column],
                                shared.slot[turn][column]};
          KVFOLD_UNROLL
          for (index_t m = 0; m < shape::row_tiles; ++m) {
            const candidate it = compared(similarity, x[m][c][j], own[m][j / 2], other);
            candidate& most = best[m][j / 2];
            most = it > most ? it : most;
          }
        }
      }
      sync_block();  // the tile may be overwritten
    }
    wait_async<0>();
    write_matches<shape>(out, cache, h, e0, count, best);
  }
};

template <class Scalar, index_t Depth, class Similarity>
void match(const Similarity& similarity, const cache_view<Scalar>& cache, const slot_lists& removed,
           const slot_lists& kept, const float* norm, const matches& out, stream stream) {
  using shape = tile_shape<Scalar, Depth>;
  launch(nearest_kept<Scalar, Depth, Similarity>{cache, removed, kept, norm, out, similarity,
                                                 cache.aligned()},
         {cache.blocks(), static_cast<unsigned>((cache.capacity + shape::rows - 1) / shape::rows)},
         stream);
}

template <class Similarity, class Scalar>
void match_by(const Similarity& similarity, const cache_view<Scalar>& cache,
              const slot_lists& removed, const slot_lists& kept, const float* norm,
              const matches& out, stream stream) {
  if (cache.dim <= 128) {
    match<Scalar, 128>(similarity, cache, removed, kept, norm, out, stream);
  } else {
    match<Scalar, 256>(similarity, cache, removed, kept, norm, out, stream);
  }
}

/// `k·k` of every slot in use, into `norm [heads, capacity]`.
template <class Scalar>
void norms(const cache_view<Scalar>& cache, float* norm, stream stream) {
  launch(squared_norms<Scalar>{cache, norm, cache.aligned()},
         {cache.blocks(), static_cast<unsigned>((cache.capacity + 255) / 256)}, stream);
}

}  // namespace detail

/// Bytes of workspace for `match`: the keys' squared norms.
inline std::size_t match_workspace_bytes(index_t heads, index_t capacity) {
  return sizeof(float) * static_cast<std::size_t>(heads) * static_cast<std::size_t>(capacity);
}

/// For every slot of `removed` the slot of `kept` whose key is most similar, ties to the lower
/// slot; NaN is the least similar. Lists stay on the device. Products in float: half and bfloat16
/// on tensor cores. Two launches, one when the similarity needs no norms.
template <class Similarity, class Scalar>
void match(const Similarity& similarity, const cache_view<Scalar>& cache, const slot_lists& removed,
           const slot_lists& kept, const matches& out, workspace memory, stream stream) {
  check(cache);
  expects(removed.slots != nullptr && removed.count != nullptr && kept.slots != nullptr &&
              kept.count != nullptr && out.into != nullptr && out.similarity != nullptr,
          "cuda match: lists of slots and room for the matches expected, null came");
  float* norm = nullptr;
  if constexpr (Similarity::norms) {
    workspace_allocator from(memory);
    norm = from.take<float>(match_workspace_bytes(cache.heads, cache.capacity) / sizeof(float));
    from.check("cuda match");
    detail::norms(cache, norm, stream);
  }
  detail::match_by(similarity, cache, removed, kept, norm, out, stream);
}

}  // namespace kvfold::cuda
