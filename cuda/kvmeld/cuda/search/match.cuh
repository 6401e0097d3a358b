// SPDX-License-Identifier: MIT
/// The nearest kept slot of every removed one.
#pragma once

#include <cstddef>  // std::size_t

#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/memory/workspace.cuh"
#include "kvmeld/cuda/search/similarities.cuh"

namespace kvmeld::cuda {

namespace detail {

/// `k·k` of every slot in use of heads that remove some: a warp a row, in the order of lanes.
template <class Scalar>
struct squared_norms {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  const index_t* removed;  // [heads] how many
  float* norm;             // [heads, capacity]
  bool aligned;

  /// Grid: heads, stretches of 256 slots.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    if (removed[h] == 0) {
      return;
    }
    const index_t begin = block_y() * 256, n = cache.length[h];
    const auto keys = cache.keys.of(h);
    for (index_t s = begin + warp(); s < n && s < begin + 256; s += threads / 32) {
      const float square = square_of(keys.at(s), cache.dim, aligned);
      if (lane() == 0) {
        norm[cache.slot(h, s)] = square;
      }
    }
  }
};

/// A block keeps a tile of removed keys, and the kept ones stream by; every lane keeps the best of
/// its own columns, so products are never stored. Ties go to the lower slot, in whatever order.
template <class Scalar, index_t Depth, class Similarity>
struct nearest_kept {
  using tiles = tile_stream<product_number<Scalar>, Depth>;
  static constexpr index_t threads = tiles::threads;
  /// Masses take registers of their own.
  static constexpr index_t resident = weighs<Similarity> ? 1 : tiles::resident;
  struct shared_memory {
    typename tiles::shared_memory rows;
    shared_array<index_t, 2 * tiles::columns> slot;  // −1: none
    shared_array<float, 2 * tiles::columns> number;
    shared_array<float, weighs<Similarity> ? 2 * tiles::columns : 1> mass;
  };

  cache_view<Scalar> cache;
  slot_lists removed, kept;
  const float* norm;  // [heads, capacity], or null: not needed
  matches out;
  Similarity similarity;
  bool aligned;

  /// Grid: heads, tiles of removed slots.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t e0 = block_y() * tiles::rows;
    const index_t count = removed.count[h], candidates = kept.count[h];
    if (e0 >= count) {
      return;
    }
    const index_t* const away = removed.slots + cache.slot(h, 0);
    const index_t* const stay = kept.slots + cache.slot(h, 0);
    const auto keys = cache.keys.of(h);
    const auto rows_of = [&](const index_t* slots, index_t n) {
      return streamed_rows{[&keys, slots](index_t i) { return keys.at(slots[i]); }, n, cache.dim,
                           aligned};
    };
    tiles::keep(shared.rows, e0, rows_of(away, count));
    key_facts own[tiles::row_tiles][2];
    unrolled<tiles::row_tiles, 2>([&](index_t m, index_t i) {
      const index_t e = e0 + tiles::row(m, 2 * i);
      own[m][i] = facts_of(h, e < count ? away[e] : -1);
    });
    nearest_columns<tiles> best;
    tiles::stream(
        shared.rows, rows_of(stay, candidates),
        [&](index_t turn, index_t column, index_t i) {
          const index_t at = turn * tiles::columns + column;
          const key_facts x = facts_of(h, i < 0 ? -1 : stay[i]);
          shared.slot[at] = x.slot, shared.number[at] = x.number;
          if constexpr (weighs<Similarity>) {
            shared.mass[at] = x.mass;
          }
        },
        [&](index_t turn, index_t column) {
          return shared.slot[turn * tiles::columns + column] < 0 ? no_score : 0.0F;
        },
        [&](const typename tiles::products& x, index_t turn, index_t) {
          const index_t at = turn * tiles::columns;
          best.take(
              x, [&](index_t column) { return shared.slot[at + column]; },
              [&](float ab, index_t m, index_t i, index_t column) {
                key_facts other{shared.number[at + column], 0, shared.slot[at + column]};
                if constexpr (weighs<Similarity>) {
                  other.mass = shared.mass[at + column];
                }
                return similarity.score(ab, own[m][i], other);
              });
        });
    const candidate most = best.of_rows(shared.rows);
    const index_t e = e0 + thread_index();
    if (thread_index() < tiles::rows && e < count) {
      write(h, e, away[e], most, stay, candidates);
    }
  }

 private:
  KVMELD_DEVICE key_facts facts_of(index_t h, index_t s) const {
    key_facts x{0, 0, s};
    if (Similarity::norms && s >= 0) {
      x.number = Similarity::number(norm[cache.slot(h, s)]);
    }
    if constexpr (weighs<Similarity>) {
      x.mass = s < 0 ? 0.0F : similarity.mass[cache.slot(h, s)];
    }
    return x;
  }
  KVMELD_DEVICE void write(index_t h, index_t e, index_t s, candidate most, const index_t* stay,
                           index_t candidates) const {
    index_t into = most_slot(most);
    float x = 0;
    if (most != 0) {
      x = Similarity::similarity(number_of(static_cast<unsigned>(most >> 32)), facts_of(h, s));
    } else if (!weighs<Similarity> && candidates > 0) {  // all are NaN
      into = stay[0], x = lowest_score;
      for (index_t i = 1; i < candidates; ++i) {
        into = stay[i] < into ? stay[i] : into;
      }
    }
    out.into[cache.slot(h, e)] = into, out.similarity[cache.slot(h, e)] = x;
  }
};

template <class Similarity, class Scalar>
void match_by(const Similarity& similarity, const cache_view<Scalar>& cache,
              const slot_lists& removed, const slot_lists& kept, const float* norm,
              const matches& out, stream stream) {
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    using kernel = nearest_kept<Scalar, decltype(depth)::value, Similarity>;
    launch(kernel{cache, removed, kept, norm, out, similarity, cache.aligned()},
           {cache.blocks(), blocks_of(cache.capacity, kernel::tiles::rows)}, stream);
  });
}

/// `k·k` of the slots of heads whose `removed` is not empty, into `norm [heads, capacity]`.
template <class Scalar>
void norms(const cache_view<Scalar>& cache, const slot_lists& removed, float* norm, stream stream) {
  launch(squared_norms<Scalar>{cache, removed.count, norm, cache.aligned()},
         {cache.blocks(), blocks_of(cache.capacity, 256)}, stream);
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
          "cuda match: expected lists of slots and an output for the matches, got null");
  float* norm = nullptr;
  if constexpr (Similarity::norms) {
    workspace_allocator from(memory);
    norm = from.take<float>(match_workspace_bytes(cache.heads, cache.capacity) / sizeof(float));
    from.check("cuda match");
    detail::norms(cache, removed, norm, stream);
  }
  detail::match_by(similarity, cache, removed, kept, norm, out, stream);
}

}  // namespace kvmeld::cuda
