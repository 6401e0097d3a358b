// SPDX-License-Identifier: MIT
/// The nearest of some centres to each point, on tensor cores.
#pragma once

#include <type_traits>  // std::integral_constant

#include "kvmeld/cuda/search/points.cuh"
#include "kvmeld/cuda/search/similarities.cuh"

namespace kvmeld::cuda::detail {

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
  KVMELD_DEVICE of_head of(const clustered_points& x, index_t h) const {
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
/// A block keeps its points in shared memory, and centres stream by. Of more than 256 halfs 128
/// points are more than every card has room for.
template <index_t Depth, index_t Rows = 128>
struct nearest_centre {
  using tiles = tile_stream<half, Depth, Rows>;
  static constexpr bool roomy = Rows * Depth > 128 * 256;
  static constexpr index_t threads = tiles::threads, resident = tiles::resident;
  static constexpr index_t rows = tiles::rows;
  struct shared_memory {
    typename tiles::shared_memory rows;
    shared_array<float, 2 * tiles::columns> half_square;
  };

  clustered_points x;
  met_centres centres;

  /// Grid: heads, tiles of slots.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = x.active.head(), e0 = block_y() * rows;
    if (x.of.rows[h] < 0 || e0 >= x.of.removed_count[h]) {
      return;
    }
    const auto c = centres.of(x, h);
    if (c.count == 0) {
      return;
    }
    const index_t size = x.of.removed_count[h];
    const index_t* const slots = x.of.removed + x.at(h, 0);
    const auto rows_of = [&](const point_rows& points, const index_t* list, index_t n) {
      return streamed_rows{
          [h, points, list](index_t i) { return points.row(h, list == nullptr ? i : list[i]); }, n,
          points.depth, true};
    };
    tiles::keep(shared.rows, e0, rows_of(x.points, slots, size));
    nearest_columns<tiles, true> best;
    tiles::stream(
        shared.rows, rows_of(c.rows, c.list, c.count),
        [&](index_t turn, index_t column, index_t i) {
          shared.half_square[turn * tiles::columns + column] =
              i < 0 ? no_score
                    : 0.5F * c.rows.square[c.rows.at(h, c.list == nullptr ? i : c.list[i])];
        },
        [&](index_t turn, index_t column) {
          return -shared.half_square[turn * tiles::columns + column];
        },
        [&](const typename tiles::products& sums, index_t, index_t c0) {
          best.take(
              sums, [&](index_t column) { return c0 + column; },
              [](float product, index_t, index_t, index_t) { return product; });
        });
    const candidate most = best.of_rows(shared.rows);
    const index_t r = thread_index(), e = e0 + r;
    if (r < rows && e < size) {
      const bool none = most == 0;  // all are NaN
      write(c, h, e, slots[e], none ? 0 : most_slot(most),
            none ? lowest_score : number_of(static_cast<unsigned>(most >> 32)));
    }
  }

 private:
  KVMELD_DEVICE void write(const met_centres::of_head& c, index_t h, index_t e, index_t s,
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

template <index_t Depth>
void meet_centres(const clustered_points& x, const met_centres& centres, unsigned heads,
                  stream stream) {
  const auto by = [&]<index_t Rows>(std::integral_constant<index_t, Rows>) {
    launch(nearest_centre<Depth, Rows>{x, centres}, {heads, blocks_of(x.points.capacity, Rows)},
           stream);
  };
  if constexpr (nearest_centre<Depth>::roomy) {
    if (!fits<nearest_centre<Depth>>()) {
      by(std::integral_constant<index_t, 64>{});
      return;
    }
  }
  by(std::integral_constant<index_t, 128>{});
}

}  // namespace kvmeld::cuda::detail
