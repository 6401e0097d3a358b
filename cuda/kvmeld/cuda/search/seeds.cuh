// SPDX-License-Identifier: MIT
/// Seeds of clusters, chosen in pools.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/device/half_tile.cuh"
#include "kvmeld/cuda/search/points.cuh"

namespace kvmeld::cuda::detail {

/// With nothing pinned the heaviest slot is the first seed. A block a head.
struct seed_heaviest {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<candidate, threads> best;
  };

  clustered_points x;
  const index_t* length;  // [heads]
  seed_lists seeds;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = x.active.head();
    if (x.of.rows[h] < 0 || seed_lists::before(x.of, h) == 0) {
      return;
    }
    candidate best = 0;
    for (index_t s = thread_index(); s < length[h]; s += threads) {
      const candidate it = most_candidate(ordered(x.weight[x.at(h, s)]), s);
      best = it > best ? it : best;
    }
    const index_t s = most_slot(block_max(shared.best, best));
    if (thread_index() == 0) {
      seeds.slots[x.at(h, 0)] = s, x.of.into[x.at(h, s)] = s | keep_evict_partition::fresh;
    }
  }
};

/// A round of `kvmeld::search::pool_seeds`: among the 256 slots that gain most the farthest from
/// each other. A block a head has what each of them would let the others' gains fall to in shared
/// memory, as half, and one warp picks. Of fewer `Rows` than the pool has, which every card has
/// room for, the rest lie in global memory. The seeds get `fresh` in `into`.
template <index_t Rows = seed_lists::rounds::pool>
struct pick_seeds {
  using rounds = seed_lists::rounds;
  using tile = half_tile<32>;
  static constexpr index_t threads = 512, pool = rounds::pool, stages = 4;
  static constexpr bool roomy = Rows == pool;
  static constexpr index_t few = 176;  ///< `Rows` that every card has room for
  static constexpr index_t side = pool / 2, pitch = pool + 8;
  static constexpr index_t stage = pool * tile::depth, lanes = 32, own = pool / lanes;
  static_assert((Rows == few || Rows == pool) && side <= Rows && own == 8 && threads == 2 * pool);
  static_assert(stages * stage <= side * pitch);  // they lie where the first half of the rows will
  using sums = warp_sums<4, 4>;
  struct shared_memory {
    shared_array<half, Rows * pitch> falls;  // [Rows, pitch]; at first stages
    shared_array<index_t, pool> place, slot;
    shared_array<float, pool> square, weight;
    shared_array<half, pool> gain;
    of_warps<float, threads> largest;
    radix_select_memory radix;
    prefix_memory<threads> prefix;
  };

  clustered_points x;
  seed_lists seeds;
  point_rows spare;  // [heads, spare_rows(depth)] scratch: rows behind `Rows`
  index_t round;

  /// Of `depth` halfs, a head, whatever `Rows` is.
  KVMELD_HD static constexpr index_t spare_rows(index_t depth) {
    return ((pool - few) * pool + depth - 1) / depth;
  }

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = x.active.head();
    if (x.of.rows[h] < 0) {
      return;
    }
    const auto now = seeds.of_round(x.of, h, round);
    if (now.count == 0) {
      return;
    }
    const index_t left = x.of.removed_count[h] - now.begin;
    const index_t wanted = left < pool ? left : pool;
    multiply(shared, h, wanted, fill_pool(shared, h, wanted));
    sync_block();
    if (warp() == 0) {
      pick(shared, h, now);
    }
  }

 private:
  /// The `wanted` slots that gain most, ties to the lower, in their order; what gains are times.
  KVMELD_DEVICE float fill_pool(shared_memory& shared, index_t h, index_t wanted) const {
    const index_t* const slots = x.of.removed + x.at(h, 0);
    const float* const gains = seeds.gain + x.at(h, 0);
    const index_t size = x.of.removed_count[h], t = thread_index();
    block_radix_select<threads>::divide(
        shared.radix, shared.prefix, slots, size, wanted,
        [gains](index_t e) { return gains[e] < 0 ? 0U : ordered(gains[e]); },
        [&](index_t s, bool is, index_t at, index_t e) {
          if (is) {
            shared.place[at] = e, shared.slot[at] = s;
          }
        });
    if (t >= wanted && t < pool) {
      shared.place[t] = 0, shared.slot[t] = slots[0];
    }
    sync_block();
    float gain = -1;
    if (t < pool) {
      const index_t s = shared.slot[t];
      gain = t < wanted ? gains[shared.place[t]] : -1.0F;
      shared.square[t] = x.points.square[x.at(h, s)], shared.weight[t] = x.weight[x.at(h, s)];
    }
    const float scale = rounds::scale(block_max(shared.largest, gain));
    if (t < pool) {
      shared.gain[t] = from_float<half>(gain < 0 ? -1.0F : gain * scale);
    }
    return scale;
  }

  KVMELD_DEVICE half* behind(index_t h, index_t row) const {
    return spare.row(h, 0) + (row - Rows) * pool;
  }

  /// The second half of the pool against all of it, then the first; of `wanted` rows.
  KVMELD_DEVICE void multiply(shared_memory& shared, index_t h, index_t wanted, float scale) const {
    const index_t row = thread_index() / tile::packs, pack = thread_index() % tile::packs;
    const half* const from[2] = {x.points.row(h, shared.slot[row]) + pack * 8,
                                 x.points.row(h, shared.slot[side + row]) + pack * 8};
    const index_t parts = x.points.depth / tile::depth, column0 = warp() % 8 * 32;
    const auto load = [&](index_t s, index_t to) {
      const index_t at = to * stage, k = s % parts * tile::depth;
      copy_async(shared.falls, at + tile::place(row, pack), from[0] + k, row < wanted ? 16 : 0);
      copy_async(shared.falls, at + tile::place(side + row, pack), from[1] + k,
                 side + row < wanted ? 16 : 0);
    };
    sums sum = {};
    each_staged<stages>(2 * parts, load, [&](index_t s, index_t at) {
      const index_t row0 = (s < parts ? side : 0) + warp() / 8 * 64;
      sum.template add<tile>(shared.falls, at * stage, row0, shared.falls, at * stage, column0);
      if (s % parts != parts - 1) {
        return;
      }
      if (s >= parts) {
        sync_block();  // stages are used up
      }
      sum.each([&](float& product, index_t r, index_t c) {
        const index_t i = row0 + r, j = column0 + c;
        const float d = shared.square[i] + shared.square[j] - 2 * product;
        const float gain = (d < 0 ? 0.0F : d) * shared.weight[j] * scale;
        const float most = rounds::most_scaled;
        const half fall = from_float<half>(i == j ? -1.0F : gain < most ? gain : most);
        if (roomy || i < Rows) {
          shared.falls[i * pitch + j] = fall;
        } else if (i < wanted) {
          behind(h, i)[j] = fall;
        }
        product = 0;
      });
    });
  }

  /// Eight of the pool a lane. A key is the gain above the place from behind, so that one maximum
  /// finds both, ties to the lower place.
  KVMELD_DEVICE void pick(shared_memory& shared, index_t h, const seed_lists::stretch& now) const {
    auto gain = shared.gain.words(lane() * own);
    unsigned chosen = 0;
    KVMELD_ROLLED
    for (index_t turn = 0; turn < now.count; ++turn) {
      index_t key = -1 << 30 << 1;  // below all
      unrolled<own / 2>([&](index_t u) {
        const auto from_behind = static_cast<unsigned>(pool - 1 - lane() * own - 2 * u);
        const auto low = static_cast<index_t>(gain[u] << 16 | from_behind);
        const auto high = static_cast<index_t>((gain[u] & 0xffff0000U) | (from_behind - 1));
        key = low > key ? low : key, key = high > key ? high : key;
      });
      const index_t p = pool - 1 - (reduce_max(key) & (pool - 1));
      const auto row = roomy || p < Rows ? shared.falls.words(p * pitch + lane() * own)
                                         : load_words(behind(h, p) + lane() * own);
      unrolled<own / 2>([&](index_t u) { gain[u] = min_pairs<half>(gain[u], row[u]); });
      chosen |= p / own == lane() ? 1U << p % own : 0U;
    }
    index_t at = now.begin + warp_prefix(count_lanes(chosen));
    KVMELD_ROLLED
    for (; chosen != 0; chosen &= chosen - 1, ++at) {
      const index_t i = lane() * own + lowest_lane(chosen), s = shared.slot[i];
      seeds.slots[x.at(h, at)] = s, seeds.gain[x.at(h, shared.place[i])] = -1;
      x.of.into[x.at(h, s)] = s | keep_evict_partition::fresh;
    }
  }
};

/// The seeds in order of slots as the list of those kept; `nearest.into`, the slot of a seed until
/// now, becomes its place there. A block a head.
struct order_seeds {
  static constexpr index_t threads = 512;
  struct shared_memory {
    prefix_memory<threads> prefix;
  };

  clustered_points x;
  const index_t* length;  // [heads]
  index_t* place;         // [heads, capacity] by slot; scratch

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = x.active.head();
    if (x.of.rows[h] < 0) {
      return;
    }
    const index_t kept = each_placed(
        shared.prefix, length[h],
        [&](index_t s) { return x.of.into[x.at(h, s)] == (s | keep_evict_partition::fresh); },
        [&](index_t s, index_t is, index_t at) {
          if (is != 0) {
            x.of.kept[x.at(h, at)] = s, place[x.at(h, s)] = at;
          }
        });
    for (index_t e = thread_index(); e < x.of.removed_count[h]; e += threads) {
      index_t& into = x.of.nearest.into[x.at(h, e)];
      into = place[x.at(h, into)];
    }
    if (thread_index() == 0) {
      x.of.kept_count[h] = kept;
    }
  }
};

}  // namespace kvmeld::cuda::detail
