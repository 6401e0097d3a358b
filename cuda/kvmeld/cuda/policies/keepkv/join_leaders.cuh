// SPDX-License-Identifier: MIT
/// KeepKV's joins: each slot, in order, goes to its most similar leader or becomes one.
#pragma once

#include "kvmeld/cuda/search/match.cuh"

namespace kvmeld::cuda::detail {

/// Which of the columns are near to each row: a bit a column, of up to 64 a warp.
template <class Stream>
struct near_columns {
  candidate bits[Stream::row_tiles][2] = {};  // of a lane's own

  /// Takes in the tile from column `first` on; `is(product, row, column)`.
  template <class Is>
  KVMELD_DEVICE void take(const typename Stream::products& x, index_t first, Is is) {
    constexpr bool whole = Stream::columns == Stream::rows;
    const index_t begin = whole ? 0 : first / Stream::columns * (Stream::column_tiles * 8);
    unrolled<Stream::column_tiles, 4, Stream::row_tiles>([&](index_t n, index_t j, index_t m) {
      const bool yes = is(x[m][n][j], Stream::row(m, j), Stream::column(n, j));
      bits[m][j / 2] |= yes ? candidate{1} << (begin + n * 8 + j % 2) : candidate{0};
    });
  }
  /// Where `of_row` finds them. The ring is idle.
  KVMELD_DEVICE void store(typename Stream::shared_memory& shared) const {
    unrolled<Stream::row_tiles, 2>([&](index_t m, index_t i) {
      const candidate all = reduce_sum(bits[m][i] << (lane() % 4 * 2), 4);
      if (lane() % 4 == 0) {
        Stream::number_of_row(shared, warp() % Stream::across, Stream::row(m, 2 * i)) = all;
      }
    });
  }
  /// Of columns `32 k ...`.
  KVMELD_DEVICE static unsigned of_row(typename Stream::shared_memory& shared, index_t r,
                                       index_t k) {
    constexpr index_t of_warp = Stream::rows / Stream::across;
    const candidate all = Stream::number_of_row(shared, 32 * k / of_warp, r);
    return static_cast<unsigned>(all >> 32 * k % of_warp & 0xffffffffU);
  }
};

/// One of as many launches as there are tiles of joiners. Joiners from this launch's tile on meet
/// the leaders that the tile before has made (the first: those from the start), all at once; then
/// those of the tile decide one after another, by which of them are near to each other alone.
template <class Scalar, index_t Depth>
struct join_leaders {
  using tiles = tile_stream<product_number<Scalar>, Depth>;
  using nearest = nearest_columns<tiles>;
  static constexpr index_t threads = tiles::threads, resident = 1;
  static constexpr index_t rows = tiles::rows, columns = tiles::columns;
  struct shared_memory {
    typename tiles::shared_memory keys;
    shared_array<index_t, 2 * columns> slot;  // −1: none
    shared_array<float, 2 * columns> number;
    shared_array<float, rows> own;                   // of joiners, what `number` is of others
    shared_array<unsigned, rows / 32> joins, leads;  // a bit each: one before the tile; itself
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;  // `nearest`: by place the score so far
  index_t* ends;            // [heads, capacity + 1] tile of joiners ↦ how many led before it
  const float* norm;        // [heads, capacity] squared
  float similarity;
  bool aligned;
  index_t tile;

  /// Grid: heads, tiles of joiners from `tile` on.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), later = block_y();
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
    const float own = is ? number_of_slot(h, joiners[e]) : 0.0F;
    const unsigned joins = ballot(!is || score_of(most) * own >= similarity);
    if (r < rows) {
      shared.own[r] = own;
      if (lane() == 0) {
        shared.joins[warp()] = joins;
      }
    }
    sync_block();
    decide(shared, h, joiners + w0, count - w0 < rows ? count - w0 : rows, end, most);
  }

 private:
  struct all_of_them {
    KVMELD_DEVICE bool operator()(index_t) const { return true; }
  };

  KVMELD_DEVICE auto keys_of(index_t h, const index_t* slots, index_t count) const {
    return streamed_rows{[keys = cache.keys.of(h), slots](index_t i) { return keys.at(slots[i]); },
                         count, cache.dim, aligned};
  }
  KVMELD_DEVICE float number_of_slot(index_t h, index_t s) const {
    return cosine_similarity::number(norm[cache.slot(h, s)]);
  }
  KVMELD_DEVICE static float score_of(candidate x) {
    return x == 0 ? lowest_score : number_of(static_cast<unsigned>(x >> 32));
  }
  KVMELD_DEVICE static bool leads(shared_memory& shared, index_t r) {
    return (shared.leads[r / 32] >> r % 32 & 1U) != 0;
  }
  /// The block's joiners and those of `count` others that `is(i)` names, `use(products, at, the
  /// first)`: what is known of others stands from `at` on.
  template <class Is, class Use>
  KVMELD_DEVICE void meet(shared_memory& shared, index_t h, const index_t* others, index_t count,
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
  /// The tile's `some` joiners, when `led` led before them; `before`: thread r's nearest of these.
  KVMELD_DEVICE void decide(shared_memory& shared, index_t h, const index_t* joiners, index_t some,
                            index_t led, candidate before) const {
    near_columns<tiles> near;
    meet(shared, h, joiners, some, all_of_them{}, [&](auto& x, index_t at, index_t first) {
      near.take(x, first, [&](float ab, index_t row, index_t column) {
        return ab * shared.number[at + column] * shared.own[row] >= similarity;
      });
    });
    near.store(shared.keys);
    sync_block();
    if (warp() == 0) {
      walk(shared, h, joiners, some, led);
    }
    sync_block();
    // The nearest of all leaders before each: those of the tile are known now.
    nearest best;
    meet(
        shared, h, joiners, some, [&](index_t i) { return leads(shared, i); },
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
    if (r < some && !leads(shared, r)) {
      most = before > most ? before : most;
      const std::ptrdiff_t at = cache.slot(h, joiners[r]);
      of.into[at] = most_slot(most);
      of.similarity[at] = cosine_similarity::similarity(score_of(most), {shared.own[r], 0, 0});
    }
  }
  /// One after another, by a warp: a slot that is near to no leader before it leads.
  KVMELD_DEVICE void walk(shared_memory& shared, index_t h, const index_t* joiners, index_t some,
                          index_t led) const {
    const unsigned before = (1U << lane()) - 1;
    unsigned all[rows / 32];  // that lead, 32 at a time
    KVMELD_UNROLL
    for (index_t k = 0; k < rows / 32; ++k) {
      const index_t r = lane() + 32 * k;
      bool joins = (shared.joins[k] >> lane() & 1U) != 0;
      KVMELD_UNROLL
      for (index_t i = 0; i < k; ++i) {
        joins = joins || (near_columns<tiles>::of_row(shared.keys, r, i) & all[i]) != 0;
      }
      const unsigned near = near_columns<tiles>::of_row(shared.keys, r, k) & before;
      KVMELD_ROLLED
      for (index_t j = 0; j < 32 && 32 * k + j < some; ++j) {
        const bool leads = shuffle(joins ? 1 : 0, j) == 0;
        joins = joins || (leads && (near >> j & 1U) != 0);
      }
      all[k] = ballot(!joins);
      if (!joins) {
        const index_t s = joiners[r];
        of.kept[cache.slot(h, led + count_lanes(all[k] & before))] = s;
        of.into[cache.slot(h, s)] = s;
      }
      if (lane() == 0) {
        shared.leads[k] = all[k];
      }
      led += count_lanes(all[k]);
    }
    if (lane() == 0) {
      ends[cache.bound(h, tile + 1)] = led;
    }
  }
};

/// `join` of slots whose norms are known.
template <class Scalar>
void join_tiles(const cache_view<Scalar>& cache, const keep_evict_partition& of, index_t* ends,
                const float* norm, float similarity, stream stream) {
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    using kernel = join_leaders<Scalar, decltype(depth)::value>;
    const index_t tiles = (cache.capacity + kernel::rows - 1) / kernel::rows;
    for (index_t tile = 0; tile < tiles; ++tile) {
      launch(kernel{cache, of, ends, norm, similarity, cache.aligned(), tile},
             {cache.blocks(), blocks_of(tiles - tile)}, stream);
    }
  });
}

/// The slots `of.removed`, in that order, join their most similar leaders, or become leaders beside
/// `of.kept`, into `of.into`, and their cosines into `of.similarity`. `ends [heads, capacity + 1]`
/// begins with the number of kept slots; `norm [heads, capacity]` is scratch. A launch for every
/// 128 slots of the capacity (floats, `q8_0`: 64), and one.
template <class Scalar>
void join(const cache_view<Scalar>& cache, const keep_evict_partition& of, index_t* ends,
          float* norm, float similarity, stream stream) {
  norms(cache, of.removed_list(), norm, stream);
  join_tiles(cache, of, ends, norm, similarity, stream);
}

}  // namespace kvmeld::cuda::detail
