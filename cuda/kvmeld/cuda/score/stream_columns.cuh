// SPDX-License-Identifier: MIT
/// Column sums of causal attention on tensor cores, two passes of one kernel.
#pragma once

#include "kvmeld/cuda/score/queries.cuh"
#include "kvmeld/cuda/score/stream_rows.cuh"
#include "kvmeld/cuda/score/stream_sums.cuh"
#include "kvmeld/cuda/score/stream_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Both passes multiply rows with all columns and keep a number or three of a row:
///
///     log_sums    rows are queries, columns slots     log Σ_j exp ℓ_ij
///     the others  rows are slots, columns queries     Σ_i w_i exp(ℓ_ij − lse_i), or the largest
///
/// over what the causal mask leaves. A block finds each tile's lowest and highest position, skips
/// tiles that no row sees, and masks only those that are not wholly seen by a warp. While a warp
/// multiplies, it takes the exponentials of the columns before. Of `parts` along the grid's z each
/// takes every `parts`-th tile; what they leave is combined in order by another launch.
template <class Scalar, index_t Depth, measured What, class Queries>
struct stream_columns {
  using shape = stream_shape<Scalar, Depth>;
  using kept = stream_sums<What, shape::row_tiles, shape::column_tiles>;
  using walk = tile_walk<shape::warps, shape::columns>;
  using bounds = typename walk::bounds;
  using copied = typename shape::copied;
  static constexpr index_t threads = shape::threads, stages = shape::stages;
  static constexpr bool of_queries = What == measured::log_sums;  // rows are queries
  struct shared_memory {
    typename shape::tile_array tile;
    shared_array<float, stages * shape::columns * 2> value;  // a column's mass; or its weight
    shared_array<float, What == measured::three_sums ? stages * shape::columns : 4> age;
    shared_array<index_t, stages * shape::columns> position;
    shared_array<index_t, shape::rows> row_position;
    shared_array<float, shape::rows> row_mass;
    typename walk::shared_memory tiles;
    shared_array<index_t, shape::warps> first, last;
  };

  cache_view<Scalar> cache;
  Queries asked;
  grouped_queries grouped;
  const float* log_sum_exp;  // [heads, group, count], for the second pass
  column_weights weights;
  float* out[3];               // of the first part
  std::ptrdiff_t part_stride;  // floats; 0: there is one part, and heads are not by place
  index_t multiplied;          // columns of a tile, in whole turns: a window's queries are fewer

  /// Grid: heads, blocks of rows, parts of the columns.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = cache.length[h];
    const auto queries = asked.of_block();
    const index_t all_rows = of_queries ? grouped.size() : n;
    const index_t all_columns = of_queries ? n : grouped.size();
    // The longest rows first: late queries see most slots, early slots are seen by most queries.
    const auto y =
        static_cast<index_t>(of_queries ? grid().y - 1 - block_index().y : block_index().y);
    const index_t r0 = y * shape::rows;
    if (r0 >= all_rows || !queries.asks(h)) {
      return;
    }
    const auto part = block_z(), parts = grid_z();
    const index_t next_position = cache.next_position[h];
    const auto keys = cache.keys.of(h);
    const index_t* const positions = cache.position_of(h);
    const float* const masses = cache.log_mass_of(h);
    const float per_scale = 1 / cache.scale, base = cache.scale * log2_e;
    const auto position_of = [&](index_t i) { return queries.position_of(h, i, next_position); };

    typename shape::fragments rows;
    const row_bounds mine = hold_rows<shape, of_queries>(
        cache, queries, grouped, r0, all_rows, rows, shared.row_position, shared.row_mass);
    if (lane() == 0) {
      shared.first[warp()] = mine.first, shared.last[warp()] = mine.last;
    }
    sync_block();
    bounds block = {never, -1};
    KVMELD_UNROLL
    for (index_t w = 0; w < shape::warps; ++w) {
      const index_t low = shared.first[w], high = shared.last[w];
      block.low = low < block.low ? low : block.low;
      block.high = high > block.high ? high : block.high;
    }

    // Tile u of this part is tile part + parts · u of all.
    const auto column_of = [&](index_t u) { return (part + parts * u) * shape::columns; };
    const auto bounds_of = [&](index_t u, index_t x) -> bounds {
      const index_t column = column_of(u) + x;
      if constexpr (of_queries) {
        if (column >= n) {
          return {never, never};
        }
        const index_t position = positions[column];
        return {position, masses[column] != 0 ? never : position};
      } else {
        const index_t i = grouped.at(column).i;
        const index_t position = i < queries.count ? position_of(i) : -1;
        return {position, position};
      }
    };
    const auto wanted = [&](bounds x) {
      return of_queries ? x.low <= block.high : x.high >= block.low;
    };
    const auto mark = [&](bounds x) {
      const bool seen = of_queries ? x.low <= mine.last : x.high >= mine.first;
      const bool whole = of_queries ? x.high <= mine.first : x.low >= mine.last && !mine.heavy;
      return (whole && cache.soft_cap.cap == 0 ? 2 : 0) | (seen ? 1 : 0);
    };
    walk tiles{(all_columns + shape::columns - 1) / shape::columns};
    tiles.tiles = (tiles.tiles - part + parts - 1) / parts;

    // Rows lie at even distances (but for pages): a multiplication a row is what the loop can
    // spare.
    const auto copy = [&](index_t u, index_t stage) {
      if constexpr (of_queries) {
        index_t s = column_of(u) + shape::first_row();
        if (keys.table == nullptr) {
          const Scalar* from = keys.data + s * keys.row;
          shape::copy(shared.tile, stage, cache.dim, [&] {
            const copied row{from, s < n};
            s += shape::step, from += shape::step * keys.row;
            return row;
          });
        } else {
          shape::copy(shared.tile, stage, cache.dim, [&] {
            const copied row{keys.at(s < n ? s : n - 1), s < n};
            s += shape::step;
            return row;
          });
        }
      } else {
        auto place = grouped.at(column_of(u) + shape::first_row());
        const Scalar* from = queries.at(h, place.g, place.i);
        const std::ptrdiff_t member = queries.at(h, 1, 0) - queries.at(h, 0, 0),
                             sixteen = queries.at(h, 0, 16) - queries.at(h, 0, 0);
        shape::copy(shared.tile, stage, cache.dim, [&] {
          const copied row{from, queries.has(place.i)};
          KVMELD_UNROLL
          for (index_t k = 0; k < shape::step; k += 16) {
            grouped.advance(place);
            from += place.g == 0 ? sixteen - (cache.group - 1) * member : member;
          }
          return row;
        });
      }
    };
    // The numbers beside a tile come by registers, one tile ahead: nothing waits for them before.
    float next_number = 0;
    index_t staged_position = 0, next_query = 0;
    const auto fetch = [&](index_t u) {
      if (thread_index() >= shape::columns) {
        return;
      }
      const index_t column = column_of(u) + thread_index();
      if constexpr (of_queries) {
        next_number = masses[column < n ? column : n - 1];
        staged_position = column < n ? positions[column] : never;
      } else {
        const auto place = grouped.at(column);
        next_query = place.i;
        const index_t i = place.i < queries.count ? place.i : queries.count - 1;
        next_number = log_sum_exp[(std::ptrdiff_t{h} * cache.group + place.g) * queries.count + i];
        staged_position = position_of(i);
      }
    };
    const auto put = [&](index_t stage) {
      if (thread_index() >= shape::columns) {
        return;
      }
      const index_t at = stage * shape::columns + thread_index();
      const float dots = next_number * per_scale;
      if constexpr (of_queries) {
        shared.value[2 * at] = dots;
      } else {
        const bool is = next_query < queries.count;
        const auto x =
            weights.template of<What>(is ? queries.count - 1 - next_query : -1, dots, base);
        shared.value[kept::place_of(at)] = x.shift, shared.value[kept::place_of(at) + 1] = x.rest;
        if constexpr (What == measured::three_sums) {
          shared.age[kept::age_of(at)] = x.age;
        }
        staged_position = is ? staged_position : -1;
      }
      shared.position[at] = staged_position;
    };
    // A model's cap, and masses: scale (x + mass / scale).
    const float unseen = base > 0 ? lowest_score : -lowest_score;
    const auto mask = [&](typename shape::products& x, index_t stage, index_t s0) {
      const index_t first = stage * shape::columns + s0;
      if constexpr (What != measured::largest) {  // for which registers are missing
        cap_products(cache, x);
      }
      shape::each(x, [&](float dot, index_t row, index_t of_sub) {
        const index_t column = first + of_sub;
        const index_t r = shared.row_position[row], s = shared.position[column];
        const float mass = of_queries ? shared.value[2 * column] : shared.row_mass[row];
        return (of_queries ? s <= r : r <= s) ? dot + mass : unseen;
      });
    };

    kept sums(base);
    typename shape::products even, odd;
    typename kept::weights weight_even = {}, weight_odd = {};
    shape::fill(odd, unseen);
    // x = the products with `sub` columns, while those before are folded.
    const auto multiply = [&](typename shape::products& x, typename kept::weights& w,
                              const typename shape::products& before,
                              const typename kept::weights& of_before, index_t stage, index_t s0) {
      kept::load(w, shared.value, shared.age, stage * shape::columns + s0);
      shape::multiply(rows, shared.tile, stage, s0, x,
                      [&](index_t m, index_t c) { sums.fold(before, of_before, m, c); });
      sums.settle(before);
    };
    index_t stage = 0, ahead_stage = 0;
    streamed_tile coming[stages - 1];  // the next one first
    KVMELD_ROLLED
    for (index_t turn = 1 - stages;; ++turn) {
      const streamed_tile now = coming[0];
      if (turn >= 0) {
        if (now.none()) {
          break;
        }
        put(stage);
        wait_async<stages - 2>();
        sync_block();  // this tile is there, the one before it is no longer needed
      }
      KVMELD_UNROLL
      for (index_t k = 0; k + 2 < stages; ++k) {
        coming[k] = coming[k + 1];
      }
      const streamed_tile ahead = tiles.next(shared.tiles, bounds_of, wanted, mark);
      coming[stages - 2] = ahead;
      if (!ahead.none()) {
        copy(ahead.number(), ahead_stage);
      }
      commit_async();
      ahead_stage = ahead_stage == stages - 1 ? 0 : ahead_stage + 1;
      if (turn >= -1 && !coming[0].none()) {
        fetch(coming[0].number());
      }
      if (turn < 0) {
        continue;
      }
      if (now.seen()) {
        KVMELD_ROLLED
        for (index_t s0 = 0; s0 < multiplied; s0 += shape::turn) {
          multiply(even, weight_even, odd, weight_odd, stage, s0);
          if (!now.whole()) {
            mask(even, stage, s0);
          }
          multiply(odd, weight_odd, even, weight_even, stage, s0 + shape::sub);
          if (!now.whole()) {
            mask(odd, stage, s0 + shape::sub);
          }
        }
      }
      stage = stage == stages - 1 ? 0 : stage + 1;
    }
    wait_async<0>();
    KVMELD_UNROLL
    for (index_t piece = 0; piece < shape::pieces; ++piece) {
      sums.fold(odd, weight_odd, piece / shape::column_tiles, piece % shape::column_tiles);
    }
    sums.settle(odd);
    write(sums, r0, all_rows, part * part_stride);
  }

 private:
  /// `at`: of this part. Parts are by place.
  KVMELD_DEVICE void write(const kept& sums, index_t r0, index_t all_rows,
                           std::ptrdiff_t at) const {
    const index_t head = part_stride == 0 ? cache.head() : place_of_block();
    KVMELD_UNROLL
    for (index_t m = 0; m < shape::row_tiles; ++m) {
      KVMELD_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        const index_t r = r0 + shape::row(m, 2 * i);
        if constexpr (of_queries) {
          const float sum = sums.log_sum(m, i, cache.scale);
          const auto place = grouped.at(r);
          if (lane() % 4 == 0 && r < all_rows && place.i < asked.count) {
            out[0][at + (std::ptrdiff_t{head} * cache.group + place.g) * asked.count + place.i] =
                part_stride == 0 ? with_sink(cache, head, place.g, sum) : sum;
          }
        } else {
          KVMELD_UNROLL
          for (index_t k = 0; k < kept::numbers; ++k) {
            const float x = sums.number(k, m, i);
            if (lane() % 4 == 0 && r < all_rows && out[k] != nullptr) {
              out[k][at + cache.slot(head, r)] = x / weights.share;
            }
          }
        }
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
