/// KeepKV's joins: each slot, in order, goes to its most similar leader or becomes one.
#pragma once

#include "kvfold/cuda/search/match.cuh"

namespace kvfold::cuda::detail {

/// One of as many launches as there are tiles of joiners. Joiners from this launch's tile on meet
/// the leaders that the tile before has made (the first: those from the start), all at once; then
/// those of the tile decide one after another, by which of them are near to each other alone.
template <class Scalar, index_t Depth>
struct join_leaders {
  using tiles = tile_stream<Scalar, Depth>;
  using nearest = nearest_columns<tiles>;
  static constexpr index_t threads = tiles::threads, resident = 1;
  static constexpr index_t rows = tiles::rows, columns = tiles::columns;
  struct shared_memory {
    typename tiles::shared_memory keys;
    shared_array<index_t, 2 * columns> slot;  // −1: none
    shared_array<float, 2 * columns> number;
    shared_array<float, rows> own;                  // of joiners, what `number` is of others
    shared_array<candidate, rows> met;              // their nearest leaders before this tile
    shared_array<unsigned char, rows * rows> near;  // [earlier, later]: they may join
    shared_array<index_t, rows> leads;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;  // `nearest`: by place the score so far
  index_t* ends;            // [heads, capacity + 1] tile of joiners ↦ how many led before it
  const float* norm;        // [heads, capacity] squared
  float similarity;
  bool aligned;
  index_t tile;

  /// Grid: heads, tiles of joiners from `tile` on.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), later = static_cast<index_t>(block_index().y);
    const index_t w0 = (tile + later) * rows, count = of.rows[h] < 0 ? 0 : of.removed_count[h];
    if (w0 >= count) {
      return;
    }
    const index_t* const led = ends + cache.bound(h, tile);
    const index_t begin = tile == 0 ? 0 : led[-1], end = led[0];
    if (tile > 0 && later > 0 && begin == end) {
      return;
    }
    const index_t* const joiners = of.removed + cache.slot(h, 0);
    const index_t r = thread_index(), e = w0 + r;
    const bool is = r < rows && e < count;
    tiles::keep(shared.keys, w0, keys_of(h, joiners, count));
    nearest best;
    meet(shared, h, of.kept + cache.slot(h, 0) + begin, end - begin, all_of_them{},
         [&](auto& x, index_t at, index_t) {
           best.take(
               x, [&](index_t column) { return shared.slot[at + column]; },
               [&](float ab, index_t, index_t, index_t column) {
                 return cosine_similarity::score(ab, {}, {shared.number[at + column], 0, 0});
               });
         });
    candidate most = best.of_rows(shared.keys);
    index_t& into = of.nearest.into[cache.slot(h, is ? e : w0)];
    float& score = of.nearest.similarity[cache.slot(h, is ? e : w0)];
    if (is && tile > 0 && into >= 0) {
      const candidate before = most_candidate(ordered(score), into);
      most = before > most ? before : most;
    }
    if (later > 0) {
      if (is) {
        into = most_slot(most), score = score_of(most);
      }
      return;
    }
    if (r < rows) {
      shared.met[r] = most;
      shared.own[r] = is ? number_of_slot(h, joiners[e]) : 0.0F;
    }
    sync_block();
    decide(shared, h, joiners + w0, count - w0 < rows ? count - w0 : rows, end);
  }

 private:
  struct all_of_them {
    KVFOLD_DEVICE bool operator()(index_t) const { return true; }
  };

  KVFOLD_DEVICE auto keys_of(index_t h, const index_t* slots, index_t count) const {
    return streamed_rows{[keys = cache.keys.of(h), slots](index_t i) { return keys.at(slots[i]); },
                         count, cache.dim, aligned};
  }
  KVFOLD_DEVICE float number_of_slot(index_t h, index_t s) const {
    return cosine_similarity::number(norm[cache.slot(h, s)]);
  }
  KVFOLD_DEVICE static float score_of(candidate x) {
    return x == 0 ? lowest_score : number_of(static_cast<unsigned>(x >> 32));
  }
  /// The block's joiners and those of `count` others that `is(i)` names, `use(products, at, the
  /// first)`: what is known of others stands from `at` on.
  template <class Is, class Use>
  KVFOLD_DEVICE void meet(shared_memory& shared, index_t h, const index_t* others, index_t count,
                          Is is, Use use) const {
    tiles::stream(
        shared.keys, keys_of(h, others, count),
        [&](index_t turn, index_t column, index_t i) {
          const index_t at = turn * columns + column, s = i >= 0 && is(i) ? others[i] : -1;
          shared.slot[at] = s, shared.number[at] = s < 0 ? 0.0F : number_of_slot(h, s);
        },
        [&](index_t turn, index_t column) {
          return shared.slot[turn * columns + column] < 0 ? no_score : 0.0F;
        },
        [&](const typename tiles::products& x, index_t turn, index_t first) {
          use(x, turn * columns, first);
        });
  }
  /// The tile's `some` joiners, when `led` led before them.
  KVFOLD_DEVICE void decide(shared_memory& shared, index_t h, const index_t* joiners, index_t some,
                            index_t led) const {
    meet(shared, h, joiners, some, all_of_them{}, [&](auto& x, index_t at, index_t first) {
      KVFOLD_UNROLL
      for (index_t n = 0; n < tiles::column_tiles; ++n) {
        KVFOLD_UNROLL
        for (index_t j = 0; j < 4; ++j) {
          const index_t column = tiles::column(n, j);
          const float number = shared.number[at + column];
          KVFOLD_UNROLL
          for (index_t m = 0; m < tiles::row_tiles; ++m) {
            const index_t row = tiles::row(m, j);
            shared.near[(first + column) * rows + row] =
                x[m][n][j] * number * shared.own[row] >= similarity ? 1 : 0;
          }
        }
      }
    });
    if (warp() == 0) {
      walk(shared, h, joiners, some, led);
    }
    sync_block();
    // The nearest of all leaders before each: those of the tile are known now.
    nearest best;
    meet(
        shared, h, joiners, some, [&](index_t i) { return shared.leads[i] != 0; },
        [&](auto& x, index_t at, index_t first) {
          best.take(
              x, [&](index_t column) { return shared.slot[at + column]; },
              [&](float ab, index_t m, index_t i, index_t column) {
                return first + column < tiles::row(m, 2 * i)
                           ? cosine_similarity::score(ab, {}, {shared.number[at + column], 0, 0})
                           : no_score;
              });
        });
    candidate most = best.of_rows(shared.keys);
    const index_t r = thread_index();
    if (r < some && shared.leads[r] == 0) {
      const candidate before = shared.met[r];
      most = before > most ? before : most;
      const std::ptrdiff_t at = cache.slot(h, joiners[r]);
      of.into[at] = most_slot(most);
      of.similarity[at] = cosine_similarity::similarity(score_of(most), {shared.own[r], 0, 0});
    }
  }
  /// One after another, by a warp: a slot that is near to no leader before it leads.
  KVFOLD_DEVICE void walk(shared_memory& shared, index_t h, const index_t* joiners, index_t some,
                          index_t led) const {
    constexpr index_t own = rows / 32;
    index_t joins[own];
    KVFOLD_UNROLL
    for (index_t k = 0; k < own; ++k) {
      const index_t r = lane() + 32 * k;
      joins[k] = r >= some || score_of(shared.met[r]) * shared.own[r] >= similarity ? 1 : 0;
    }
    KVFOLD_UNROLL
    for (index_t k = 0; k < own; ++k) {
      for (index_t j = 0; j < 32 && 32 * k + j < some; ++j) {
        const index_t leads = 1 - shuffle(joins[k], j);
        KVFOLD_UNROLL
        for (index_t i = k; i < own; ++i) {
          const index_t r = lane() + 32 * i;
          const index_t near = shared.near[(32 * k + j) * rows + r];
          joins[i] |= r > 32 * k + j ? leads & near : 0;
        }
      }
      const bool leads = joins[k] == 0;
      const unsigned all = ballot(leads);
      const index_t r = lane() + 32 * k;
      shared.leads[r] = leads ? 1 : 0;
      if (leads) {
        const index_t s = joiners[r];
        of.kept[cache.slot(h, led + count_lanes(all & ((1U << lane()) - 1)))] = s;
        of.into[cache.slot(h, s)] = s;
      }
      led += count_lanes(all);
    }
    if (lane() == 0) {
      ends[cache.bound(h, tile + 1)] = led;
    }
  }
};

template <index_t Depth, class Scalar>
void join_tiles(const cache_view<Scalar>& cache, const keep_evict_partition& of, index_t* ends,
                const float* norm, float similarity, stream stream) {
  using kernel = join_leaders<Scalar, Depth>;
  const index_t tiles = (cache.capacity + kernel::rows - 1) / kernel::rows;
  for (index_t tile = 0; tile < tiles; ++tile) {
    launch(kernel{cache, of, ends, norm, similarity, cache.aligned(), tile},
           {cache.blocks(), static_cast<unsigned>(tiles - tile)}, stream);
  }
}

/// The slots `of.removed`, in that order, join their most similar leaders, or become leaders beside
/// `of.kept`, into `of.into`, and their cosines into `of.similarity`. `ends [heads, capacity + 1]`
/// begins with the number of kept slots; `norm [heads, capacity]` is scratch. A launch for every
/// 128 slots of the capacity (floats: 64), and one.
template <class Scalar>
void join(const cache_view<Scalar>& cache, const keep_evict_partition& of, index_t* ends,
          float* norm, float similarity, stream stream) {
  norms(cache, norm, stream);
  if (cache.dim <= 128) {
    join_tiles<128>(cache, of, ends, norm, similarity, stream);
  } else {
    join_tiles<256>(cache, of, ends, norm, similarity, stream);
  }
}

}  // namespace kvfold::cuda::detail
