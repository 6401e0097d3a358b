// SPDX-License-Identifier: MIT
/// A plan's numbers beside the rows, in place: log-mass, positions and columns of a head.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// By a block: a thread merges a row's columns, rows of very many sources the block; then slots
/// move. A thread has `rows_at_once` rows, or `at_once` sources of all columns, in flight: what
/// a plan costs here is trips to memory, one behind the other.
template <class Scalar, index_t Threads>
struct apply_records {
  static constexpr index_t threads = Threads, warps = Threads / 32;
  static constexpr index_t very_many = 128;  // sources
  static constexpr index_t at_once = 8, rows_at_once = 4;
  static_assert(rows_at_once * warps == 32);  // so many words of 32 rows, one a lane
  struct shared_memory {
    shared_array<unsigned, 32> long_rows;  // a bit a row
    shared_array<float, max_columns * warps> partial;
  };

  const cache_view<Scalar>& cache;
  const state_view& state;
  const plan_view& plan;
  index_t h, rows;
  const index_t* begin;
  const merge_source* sources;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    for (index_t r0 = 0; r0 < rows; r0 += rows_at_once * threads) {
      merge(shared, r0);
    }
    for (index_t r0 = 0; r0 < rows; r0 += rows_at_once * threads) {
      move(r0);
    }
    if (thread_index() == 0) {
      cache.length[h] = rows;
    }
  }

 private:
  KVMELD_DEVICE static index_t row(index_t r0, index_t u) {
    return r0 + u * threads + thread_index();
  }

  /// Log-mass and columns into the anchors of rows from `r0` on. A row that is one slot keeps its
  /// columns.
  KVMELD_DEVICE void merge(shared_memory& shared, index_t r0) const {
    index_t first[rows_at_once], count[rows_at_once];
    float mass[rows_at_once];
    KVMELD_UNROLL
    for (index_t u = 0; u < rows_at_once; ++u) {
      const index_t r = row(r0, u);
      first[u] = r < rows ? begin[r] : 0;
      count[u] = r < rows ? begin[r + 1] - first[u] : 0;
      mass[u] = r < rows ? plan.log_mass[cache.slot(h, r)] : 0.0F;
    }
    index_t anchor[rows_at_once];
    KVMELD_UNROLL
    for (index_t u = 0; u < rows_at_once; ++u) {
      anchor[u] = count[u] > 0 ? sources[first[u]].source : 0;
    }
    KVMELD_UNROLL
    for (index_t u = 0; u < rows_at_once; ++u) {
      if (count[u] > 0) {
        cache.log_mass_of(h)[anchor[u]] = mass[u];
      }
      const unsigned many = ballot(count[u] > very_many);
      if (lane() == 0) {
        shared.long_rows[u * warps + warp()] = many;
      }
    }
    KVMELD_ROLLED
    for (index_t u = 0; u < rows_at_once && state.count > 0; ++u) {
      const index_t r = row(r0, u), e = r < rows ? begin[r] : 0;
      const index_t end = r < rows ? begin[r + 1] : 0;
      if (end - e > 1 && end - e <= very_many) {
        const index_t to = sources[e].source;
        numbers x = of_slot(to);
        add(x, e + 1, end, 1);
        store(x, to);
      }
    }
    sync_block();
    const unsigned mine = shared.long_rows[lane()];
    for (unsigned words = ballot(mine != 0); words != 0; words &= words - 1) {
      const index_t word = lowest_lane(words);
      for (unsigned bits = shuffle(mine, word); bits != 0; bits &= bits - 1) {
        merge_by_block(shared, r0 + 32 * word + lowest_lane(bits));
      }
    }
    sync_block();
  }

  /// A slot's columns.
  struct numbers {
    float of[max_columns];
  };
  KVMELD_DEVICE numbers of_slot(index_t s) const {
    numbers x;
    KVMELD_UNROLL
    for (index_t c = 0; c < max_columns; ++c) {
      x.of[c] = c < state.count ? state.column(c, h)[s] : 0.0F;
    }
    return x;
  }
  KVMELD_DEVICE void store(const numbers& x, index_t s) const {
    KVMELD_UNROLL
    for (index_t c = 0; c < max_columns; ++c) {
      if (c < state.count) {
        state.column(c, h)[s] = x.of[c];
      }
    }
  }

  /// Every `step`-th of the sources from `e` on, in order.
  KVMELD_DEVICE void add(numbers& x, index_t e, index_t end, index_t step) const {
    KVMELD_ROLLED
    for (; e < end; e += at_once * step) {
      index_t s[at_once];
      KVMELD_UNROLL
      for (index_t k = 0; k < at_once; ++k) {
        s[k] = e + k * step < end ? sources[e + k * step].source : -1;
      }
      KVMELD_UNROLL
      for (index_t c = 0; c < max_columns; ++c) {
        if (c < state.count) {
          const float* const column = state.column(c, h);
          float y[at_once];
          KVMELD_UNROLL
          for (index_t k = 0; k < at_once; ++k) {
            y[k] = s[k] >= 0 ? column[s[k]] : 0.0F;
          }
          KVMELD_UNROLL
          for (index_t k = 0; k < at_once; ++k) {
            x.of[c] =
                s[k] >= 0 ? kvmeld::detail::reduced_stat(state.merges[c], x.of[c], y[k]) : x.of[c];
          }
        }
      }
    }
  }

  /// A row of very many sources: columns of all of them into the anchor's.
  KVMELD_DEVICE void merge_by_block(shared_memory& shared, index_t r) const {
    if (state.count == 0) {
      return;
    }
    const index_t anchor = sources[begin[r]].source;
    numbers x = of_slot(anchor);
    const auto adds = [&](index_t c) { return state.merges[c] == slot_reduce::sum; };
    KVMELD_UNROLL
    for (index_t c = 0; c < max_columns; ++c) {
      x.of[c] = adds(c) && thread_index() > 0 ? 0.0F : x.of[c];  // the anchor's counts once
    }
    add(x, begin[r] + 1 + thread_index(), begin[r + 1], threads);
    KVMELD_UNROLL
    for (index_t c = 0; c < max_columns; ++c) {
      if (c < state.count) {
        const float of_warp = adds(c) ? reduce_sum(x.of[c]) : reduce_max(x.of[c]);
        if (lane() == 0) {
          shared.partial[c * warps + warp()] = of_warp;
        }
      }
    }
    sync_block();
    const index_t c = thread_index();
    if (c < state.count && state.merges[c] != slot_reduce::anchor) {
      float all = shared.partial[c * warps];
      for (index_t w = 1; w < warps; ++w) {
        all = kvmeld::detail::reduced_stat(state.merges[c], all, shared.partial[c * warps + w]);
      }
      state.column(c, h)[anchor] = all;
    }
    sync_block();
  }

  /// What anchors have, to rows from `r0` on: no later row's anchor lies below its row, and so none
  /// in a row written here, though the last slot may be moved into a gap.
  KVMELD_DEVICE void move(index_t r0) const {
    index_t from[rows_at_once], where[rows_at_once] = {};
    float mass[rows_at_once] = {};
    numbers x[rows_at_once] = {};
    KVMELD_UNROLL
    for (index_t u = 0; u < rows_at_once; ++u) {
      const index_t r = row(r0, u);
      from[u] = r < rows ? sources[begin[r]].source : r;
    }
    KVMELD_UNROLL
    for (index_t u = 0; u < rows_at_once; ++u) {
      if (from[u] != row(r0, u)) {
        mass[u] = cache.log_mass_of(h)[from[u]];
        where[u] = cache.position_of(h)[from[u]];
        x[u] = of_slot(from[u]);
      }
    }
    sync_block();  // all are read
    KVMELD_UNROLL
    for (index_t u = 0; u < rows_at_once; ++u) {
      if (const index_t r = row(r0, u); from[u] != r) {
        cache.log_mass_of(h)[r] = mass[u], cache.position_of(h)[r] = where[u];
        store(x[u], r);
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
