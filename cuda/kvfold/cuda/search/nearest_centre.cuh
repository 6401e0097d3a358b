/// The nearest of some centres to each point, on tensor cores.
#pragma once

#include "kvfold/cuda/device/block_collectives.cuh"
#include "kvfold/cuda/device/half_tile.cuh"
#include "kvfold/cuda/search/points.cuh"

namespace kvfold::cuda::detail {

/// What points meet: centres, a round of seeds, or what is pinned.
struct met_centres {
  static constexpr index_t means = -2, pinned = -1;  ///< else a round of seeds

  point_rows means_of;  ///< [heads, most]
  seed_lists seeds;
  index_t which;

  struct of_head {
    point_rows rows;
    const index_t* list;  // which of them; null: the first
    index_t count;
    bool are_seeds;
  };
  KVFOLD_DEVICE of_head of(const clustered_points& x, index_t h) const {
    if (which == means) {
      return {means_of, nullptr, x.of.kept_count[h], false};
    }
    const index_t* const list = seeds.slots + x.at(h, 0);
    if (which != pinned) {
      const auto round = seeds.of_round(x.of, h, which);
      return {x.points, list + round.begin, round.count, true};
    }
    const bool any = seed_lists::before(x.of, h) == 0;
    return any ? of_head{x.points, x.of.kept + x.at(h, 0), x.of.kept_count[h], false}
               : of_head{x.points, list, 1, true};
  }
};

/// For every clustered slot the largest `x·c − |c|²/2`, ties to the lower centre. Of means the
/// centre in `nearest.into`. Of seeds the slot of the nearest so far, ties to the lower slot, with
/// the product in `nearest.similarity`; of these and the pinned what the slot would gain as a seed.
/// A block keeps its points in shared memory, and centres stream by, 128 at a time and 64 deep.
template <index_t Depth>
struct nearest_centre {
  using tile = half_tile<64>;
  static constexpr index_t warps = 8, threads = 32 * warps, across = 4;
  static constexpr index_t rows = 128, columns = 128, of_tile = columns * tile::depth;
  static constexpr index_t stages = Depth <= 256 ? 3 : 2, resident = Depth <= 256 ? 2 : 1;
  static constexpr index_t loads = columns * tile::packs / threads, step = threads / tile::packs;
  using sums = warp_sums<4, 4>;
  struct shared_memory {
    shared_array<half, rows * Depth> points;
    shared_union<shared_array<half, stages * of_tile>, shared_array<candidate, across * rows>> ring;
    shared_array<float, 2 * columns> half_square;  // of two tiles
  };

  clustered_points x;
  met_centres centres;

  /// Grid: heads, tiles of slots.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = x.active.head(), e0 = static_cast<index_t>(block_index().y) * rows;
    if (x.of.rows[h] < 0 || e0 >= x.of.removed_count[h]) {
      return;
    }
    const auto c = centres.of(x, h);
    if (c.count == 0) {
      return;
    }
    const index_t size = x.of.removed_count[h], parts = x.points.depth / tile::depth;
    const index_t* const slots = x.of.removed + x.at(h, 0);
    const index_t first = thread_index() / tile::packs, pack = thread_index() % tile::packs;
    const index_t row0 = warp() / across * 64, column0 = warp() % across * 32;
    const index_t steps = (c.count + columns - 1) / columns * parts;

    // Each thread copies the same rows of every part of a tile.
    const half* from[loads];
    index_t ahead_tile = 0, ahead_part = 0, ahead_stage = 0;
    const auto copy = [&] {
      if (ahead_tile * columns < c.count) {
        if (ahead_part == 0) {
          KVFOLD_UNROLL
          for (index_t u = 0; u < loads; ++u) {
            from[u] = c.rows.row(h, centre(c, ahead_tile * columns + first + u * step)) + pack * 8;
          }
          if (thread_index() < columns) {
            const index_t i = ahead_tile * columns + thread_index();
            shared.half_square[ahead_tile % 2 * columns + thread_index()] =
                i < c.count ? 0.5F * c.rows.square[c.rows.at(h, centre(c, i))] : -lowest_score;
          }
        }
        KVFOLD_UNROLL
        for (index_t u = 0; u < loads; ++u) {
          const bool is = ahead_tile * columns + first + u * step < c.count;
          copy_async(shared.ring.first, ahead_stage * of_tile + tile::place(first + u * step, pack),
                     from[u] + ahead_part * tile::depth, is ? 16 : 0);
        }
      }
      commit_async();
      ahead_part = ahead_part == parts - 1 ? 0 : ahead_part + 1;
      ahead_tile += ahead_part == 0 ? 1 : 0;
      ahead_stage = ahead_stage == stages - 1 ? 0 : ahead_stage + 1;
    };
    // The block's points come part by part, the first of them with what is needed first.
    const half* own[loads];
    KVFOLD_UNROLL
    for (index_t u = 0; u < loads; ++u) {
      const index_t e = e0 + first + u * step;
      own[u] = x.points.row(h, slots[e < size ? e : size - 1]) + pack * 8;
    }
    for (index_t k = 0; k < parts; ++k) {
      KVFOLD_UNROLL
      for (index_t u = 0; u < loads; ++u) {
        copy_async(shared.points, k * rows * tile::depth + tile::place(first + u * step, pack),
                   own[u] + k * tile::depth, e0 + first + u * step < size ? 16 : 0);
      }
      if (k < stages - 1) {
        copy();
      }
    }

    float best[4][2];
    index_t which[4][2];
    KVFOLD_UNROLL
    for (index_t m = 0; m < 4; ++m) {
      best[m][0] = best[m][1] = lowest_score, which[m][0] = which[m][1] = 0;
    }
    sums sum;
    KVFOLD_ROLLED
    for (index_t s = 0, part = 0, c0 = 0, stage = 0; s < steps; ++s) {
      wait_async<stages - 2>();
      sync_block();
      copy();
      if (part == 0) {
        sum.each([&](float& y, index_t, index_t column) {
          y = -shared.half_square[c0 / columns % 2 * columns + column0 + column];
        });
      }
      sum.template add<tile>(shared.points, part * rows * tile::depth, row0, shared.ring.first,
                             stage * of_tile, column0);
      stage = stage == stages - 1 ? 0 : stage + 1;
      if (++part == parts) {
        KVFOLD_UNROLL
        for (index_t n = 0; n < 4; ++n) {
          KVFOLD_UNROLL
          for (index_t m = 0; m < 4; ++m) {
            KVFOLD_UNROLL
            for (index_t i = 0; i < 4; ++i) {
              if (sum.x[m][n][i] > best[m][i / 2]) {
                best[m][i / 2] = sum.x[m][n][i];
                which[m][i / 2] = c0 + column0 + sums::column(n, i);
              }
            }
          }
        }
        part = 0, c0 += columns;
      }
    }
    wait_async<0>();
    sync_block();
    KVFOLD_UNROLL
    for (index_t m = 0; m < 4; ++m) {
      KVFOLD_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        const candidate it = reduce_quad(most_candidate(ordered(best[m][i]), which[m][i]));
        if (lane() % 4 == 0) {
          shared.ring.then[warp() % across * rows + row0 + sums::row(m, 2 * i)] = it;
        }
      }
    }
    sync_block();
    const index_t r = thread_index(), e = e0 + r;
    if (r < rows && e < size) {
      candidate most = shared.ring.then[r];
      KVFOLD_UNROLL
      for (index_t w = 1; w < across; ++w) {
        const candidate it = shared.ring.then[w * rows + r];
        most = it > most ? it : most;
      }
      write(c, h, e, slots[e], most_slot(most), number_of(static_cast<unsigned>(most >> 32)));
    }
  }

 private:
  KVFOLD_DEVICE static index_t centre(const met_centres::of_head& c, index_t i) {
    const index_t there = i < c.count ? i : c.count - 1;
    return c.list == nullptr ? there : c.list[there];
  }
  /// The largest over the four lanes that share rows.
  KVFOLD_DEVICE static candidate reduce_quad(candidate x) {
    KVFOLD_UNROLL
    for (index_t d = 1; d < 4; d *= 2) {
      const candidate y = shuffle_xor(x, d);
      x = y > x ? y : x;
    }
    return x;
  }

  KVFOLD_DEVICE void write(const met_centres::of_head& c, index_t h, index_t e, index_t s,
                           index_t i, float product) const {
    const std::ptrdiff_t at = x.at(h, e);
    index_t& into = x.of.nearest.into[at];
    if (centres.which == met_centres::means) {
      into = i;
      return;
    }
    const float d = x.points.square[x.at(h, s)] - 2 * product;
    const float gain = x.weight[x.at(h, s)] * (d > 0 && product > lowest_score ? d : 0.0F);
    const float number = gain == gain ? gain : 0.0F;
    float& least = centres.seeds.gain[at];
    const bool first = centres.which == met_centres::pinned;
    if (first || number < least) {
      least = number;
    }
    if (c.are_seeds) {
      float& nearest = x.of.nearest.similarity[at];
      const index_t seed = c.list[i];
      const bool none = first || (centres.which == 0 && seed_lists::before(x.of, h) == 0);
      if (none || product > nearest || (product == nearest && seed < into)) {
        nearest = product, into = seed;
      }
      if (first && seed == s) {
        least = -1;
      }
    }
  }
};

}  // namespace kvfold::cuda::detail
