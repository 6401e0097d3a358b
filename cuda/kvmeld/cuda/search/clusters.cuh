// SPDX-License-Identifier: MIT
/// Weighted k-means of a head's points: members of each centre, and their means.
#pragma once

#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/search/nearest_centre.cuh"
#include "kvmeld/cuda/search/seeds.cuh"

namespace kvmeld::cuda::detail {

/// What clusters are made in.
struct cluster_scratch {
  point_rows means;  ///< of the clusters, at least `pick_seeds<>::spare_rows` a head
  index_t *members, *spare, *by_slot;  ///< [heads, capacity]
  index_t* begin;                      ///< [heads, capacity + 1] centre ↦ its first member

  KVMELD_DEVICE index_t* begin_of(const clustered_points& x, index_t h) const {
    return begin + h * (std::ptrdiff_t{x.points.capacity} + 1);
  }
};

/// The weighted means of points that lie together in `members`, rounded to half. A centre without
/// members stays where it is, at first at its seed. A warp a centre, which may have hundreds.
struct mean_centres {
  static constexpr index_t threads = 256;
  static constexpr index_t some = 4;  // members in flight
  struct shared_memory {};

  clustered_points x;
  cluster_scratch work;
  bool first;

  /// Grid: heads, any number of blocks that share the centres.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = x.active.head();
    if (x.of.rows[h] < 0) {
      return;
    }
    const index_t* const from = work.begin_of(x, h);
    each_by_warp<threads>(x.of.kept_count[h], [&](index_t c) {
      const bool moved = place(h, c, work.members + x.at(h, from[c]), from[c + 1] - from[c]);
      if (first && !moved) {
        place(h, c, x.of.kept + x.at(h, c), 1);
      }
    });
  }

 private:
  KVMELD_DEVICE bool place(index_t h, index_t c, const index_t* slots, index_t size) const {
    const point_rows& to = work.means;
    float square = 0;
    KVMELD_ROLLED
    for (index_t column = 0; column < to.depth; column += 256) {
      const index_t i = column + lane() * 8;
      float sum[8] = {}, total = 0;
      for (index_t base = 0; base < size; base += 32) {
        const index_t mine = slots[base + lane() < size ? base + lane() : 0];
        const float weight = size == 1 ? 1.0F : x.weight[x.at(h, mine)];
        const index_t count = size - base < 32 ? size - base : 32;
        KVMELD_ROLLED
        for (index_t e0 = 0; e0 < count; e0 += some) {
          vector_16<half> row[some];
          unrolled<some>([&](index_t e) {
            const half* const from = x.points.row(h, shuffle(mine, e0 + e));
            row[e] = i < to.depth && e0 + e < count ? load_16(from + i) : vector_16<half>{};
          });
          unrolled<some>([&](index_t e) {
            const float w = e0 + e < count ? shuffle(weight, e0 + e) : 0.0F;
            total += w;
            unrolled<8>([&](index_t j) { sum[j] += w * to_float(row[e][j]); });
          });
        }
      }
      if (!(total > 0)) {
        return false;
      }
      if (i < to.depth) {
        vector_16<half> y;
        unrolled<8>([&](index_t j) {
          y[j] = from_float<half>(sum[j] / total);
          square += to_float(y[j]) * to_float(y[j]);
        });
        store_16(to.row(h, c) + i, y);
      }
    }
    square = reduce_sum(square);
    if (lane() == 0) {
      to.square[to.at(h, c)] = square;
    }
    return true;
  }
};

/// The clustered slots with those of a centre together, in the order they came in. A block a head.
struct group_members {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
  };

  clustered_points x;
  cluster_scratch to;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = x.active.head();
    if (x.of.rows[h] < 0) {
      return;
    }
    const index_t size = x.of.removed_count[h], all = x.of.kept_count[h];
    index_t* const members = to.members + x.at(h, 0);
    index_t* const of = to.by_slot + x.at(h, 0);
    for (index_t e = thread_index(); e < size; e += threads) {
      const index_t s = x.of.removed[x.at(h, e)];
      members[e] = s, of[s] = x.of.nearest.into[x.at(h, e)];
    }
    const index_t* const sorted =
        block_sort(shared.sort, members, to.spare + x.at(h, 0), size, static_cast<unsigned>(all),
                   [&](index_t s) { return static_cast<unsigned>(of[s]); });
    index_t* const first = to.begin_of(x, h);
    for (index_t e = thread_index(); e <= size; e += threads) {
      const index_t before = e == 0 ? -1 : of[sorted[e - 1]], own = e == size ? all : of[sorted[e]];
      for (index_t c = before + 1; c <= own; ++c) {
        first[c] = e;
      }
      if (e < size) {
        members[e] = sorted[e];
      }
    }
  }
};

/// Clusters of points (`kvmeld::search::cluster`): the seeds become `x.of.kept`, and
/// `x.of.nearest.into` the place there of every slot that was to be clustered. `x.of.kept` are the
/// pinned at first; rows up to `Depth` halfs. Launches: 3, two a round of seeds, three a round of
/// Lloyd's but the first.
template <index_t Depth>
void cluster_points(const clustered_points& x, const index_t* length, const seed_lists& seeds,
                    const cluster_scratch& work, index_t rounds, unsigned heads, stream stream) {
  const index_t target = seeds.limits.most_target();
  const auto meet = [&](index_t which) {
    meet_centres<Depth>(x, {work.means, seeds, which}, heads, stream);
  };
  launch(seed_heaviest{x, length, seeds}, {heads}, stream);
  meet(met_centres::pinned);
  for (index_t round = 0; round < seed_lists::rounds::most_rounds(target); ++round) {
    if (fits<pick_seeds<>>()) {
      launch(pick_seeds<>{x, seeds, work.means, round}, {heads}, stream);
    } else {
      launch(pick_seeds<pick_seeds<>::few>{x, seeds, work.means, round}, {heads}, stream);
    }
    meet(round);
  }
  launch(order_seeds{x, length, work.by_slot}, {heads}, stream);
  for (index_t round = 1; round < rounds; ++round) {
    launch(group_members{x, work}, {heads}, stream);
    launch(mean_centres{x, work, round == 1}, {heads, blocks_of(target, 32)}, stream);
    meet(met_centres::means);
  }
}

}  // namespace kvmeld::cuda::detail
