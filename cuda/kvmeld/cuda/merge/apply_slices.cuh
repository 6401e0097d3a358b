// SPDX-License-Identifier: MIT
/// A plan's rows of keys or values, in place: a block's slice of all rows of a head.
#pragma once

#include "kvmeld/cuda/merge/merge_ahead.cuh"

namespace kvmeld::cuda::detail {

/// Columns of a matrix of rows are independent of each other, in merging as in moving. So a block
/// takes a slice of all rows of one head's keys or values, `Lanes` lanes of 16 bytes a row, and its
/// own barriers are all the order there is. Rows go to their slots in chunks, `n` of them in each:
///
///     read     the chunk's sources arrive in shared memory; those of the next two are in flight
///     barrier
///     write    its rows, to slots n c ... n c + n - 1
///
/// Anchors are no lower than their rows, and ascend, but for the last slot in the place of the only
/// one that goes (`make_rows`): so what later rows still read lies above, but for sources below
/// their row's chunk. Rows with such a source are merged ahead of all others, into their anchor's
/// slot, which no other row reads, and then moved; so are rows of more sources than shared memory
/// has room for, those of very many by the whole block. Other rows are read and written once. Of a
/// row that stays and is one unchanged slot no byte is touched. Bytes move only: `merge_blocks` has
/// merged them, into anchors' slots.
template <class Scalar, index_t Lanes>
struct apply_slices : row_slice<Scalar, Lanes> {
  using slice = row_slice<Scalar, Lanes>;
  using slice::add, slice::aligned, slice::correction, slice::delta, slice::dim, slice::range_of,
      slice::i, slice::lanes, slice::pieces, slice::first_lane, slice::rows, slice::sources,
      slice::weight, slice::width, slice::x;
  using typename slice::source_range;
  using typename slice::vector;
  static constexpr index_t threads = 256;
  static constexpr bool merges = !std::is_same_v<Scalar, std::int8_t>;
  static constexpr index_t chunk = threads / lanes;  // rows
  using merges_ahead = merge_ahead<Scalar, Lanes, threads>;
  using row_ring = detail::row_ring<Scalar, threads>;
  static constexpr index_t stages = row_ring::stages;  // chunks in flight
  struct shared_memory {
    row_ring ring;
    typename merges_ahead::shared_memory ahead;
  };

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    if constexpr (merges) {
      merges_ahead{*this}(shared.ahead, shared.ring);
    }
    source_range of[stages + 2];
    KVMELD_UNROLL
    for (index_t c = 0; c < stages + 2; ++c) {
      of[c] = range_of(row(c));
    }
    known next[stages + 1];
    KVMELD_UNROLL
    for (index_t c = 0; c < stages + 1; ++c) {
      next[c] = source_of(of[c]);
    }
    coming on_way[stages];
    KVMELD_UNROLL
    for (index_t c = 0; c < stages; ++c) {
      on_way[c] = copy(shared, c, c, next[c]);
    }
    known after = next[stages];
    source_range later = of[stages + 1];
    for (index_t c = 0, stage = 0; c * chunk < rows; ++c, stage = row_ring::after(stage)) {
      wait_async<stages - 1>();
      vector merged;
      const bool writes = merge(shared, stage, row(c), on_way[0], merged);
      KVMELD_UNROLL
      for (index_t k = 0; k + 1 < stages; ++k) {
        on_way[k] = on_way[k + 1];
      }
      on_way[stages - 1] = copy(shared, c + stages, stage, after);
      after = source_of(later);
      later = range_of(row(c + stages + 2));
      sync_block();  // all of the chunk is read
      if (writes) {
        store_row(x.at(row(c)), i, dim, aligned, merged);
      }
    }
    wait_async<0>();
  }

 private:
  /// Of a row's sources the count, and the one that this lane knows: of the first four.
  struct known {
    index_t count = 0, source = 0;
    float weight = 0;
  };
  /// A row in the ring: pieces, 0 if nothing is to be done, and this lane's weight.
  struct coming {
    index_t count = 0;
    bool merged = false, moves = false;  // ahead; to another slot
    float weight = 0;
  };

  KVMELD_DEVICE static index_t row(index_t c) { return c * chunk + thread_index() / lanes; }

  KVMELD_DEVICE known source_of(const source_range& of) const {
    const index_t e = lane() % lanes;
    if (of.count == 0) {
      return {};
    }
    const merge_source* const own = sources + of.begin + (e < of.count && e < pieces ? e : 0);
    return {merges ? of.count : 1, own->source, merges ? own->*weight : 1.0F};
  }

  /// Does a row of up to `pieces` sources read a slot that is written before the row's chunk? Of
  /// the row's lanes.
  KVMELD_DEVICE static bool reads_back(const known& of, index_t first) {
    const index_t e = lane() % lanes;
    const bool back = e > 0 && e < of.count && e < pieces && of.source < first;
    return (ballot(back) >> first_lane() & ((1U << pieces) - 1)) != 0;
  }

  /// Starts to copy what row `row(c)` is made of.
  KVMELD_DEVICE coming copy(shared_memory& shared, index_t c, index_t stage,
                            const known& of) const {
    const bool back = reads_back(of, c * chunk);
    coming y{of.count, of.count > pieces || back, false, of.weight};
    y.count = y.merged ? 1 : y.count;
    const index_t anchor = shuffle(of.source, first_lane());
    const float first = shuffle(of.weight, first_lane());
    y.moves = anchor != row(c);
    if (!y.moves && (y.merged || (y.count == 1 && first == 1.0F && delta == nullptr))) {
      y.count = 0;
    }
    KVMELD_UNROLL
    for (index_t e = 0; e < pieces; ++e) {
      const index_t source = shuffle(of.source, first_lane() + e);
      if (e < y.count && i < dim) {
        shared.ring.copy(stage, e, x.at(source), i, dim, aligned);
      }
    }
    commit_async();
    return y;
  }

  /// `Σ weight · row + delta` of 16 bytes, summed in float in the plan's order. Is it to be
  /// written?
  KVMELD_DEVICE bool merge(const shared_memory& shared, index_t stage, index_t r, const coming& of,
                           vector& y) const {
    float w[pieces];
    KVMELD_UNROLL
    for (index_t e = 0; e < pieces; ++e) {
      w[e] = shuffle(of.weight, first_lane() + e);
    }
    if (of.count == 0 || i >= dim) {
      return false;
    }
    y = shared.ring.at(stage, 0);
    if constexpr (merges) {
      if (!of.merged) {
        return sum_sources(shared, stage, r, of, w, y);
      }
    }
    return of.moves;
  }
  KVMELD_DEVICE bool sum_sources(const shared_memory& shared, index_t stage, index_t r,
                                 const coming& of, const float (&w)[pieces], vector& y) const {
    float sum[width];
    bool changes = of.count > 1 || w[0] != 1.0F;
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      sum[j] = correction(r, j);
      changes = changes || sum[j] != 0.0F;
    }
    if (!changes) {
      return of.moves;
    }
    KVMELD_UNROLL
    for (index_t e = 0; e < pieces; ++e) {
      if (e < of.count) {
        add(sum, w[e], shared.ring.at(stage, e));
      }
    }
    y = rounded<Scalar>(sum);
    return true;
  }
};

}  // namespace kvmeld::cuda::detail
