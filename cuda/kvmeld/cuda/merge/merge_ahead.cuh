// SPDX-License-Identifier: MIT
/// Rows of a plan that are merged before others are moved.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/merge/row_slice.cuh"

namespace kvmeld::cuda::detail {

/// Merges rows of more than `slice::pieces` sources, and rows with a source that lies below their
/// chunk, into their anchors' slots: `Lanes` lanes a row, or the whole block a row of very many.
/// Sources come through the ring that the moving of rows uses after: twelve to sixteen of each lane
/// are in flight, so that a row takes a round trip to memory for every twelve of a lane's.
template <class Scalar, index_t Lanes, index_t Threads>
struct merge_ahead : row_slice<Scalar, Lanes> {
  using slice = row_slice<Scalar, Lanes>;
  using ring = row_ring<Scalar, Threads>;
  using slice::add, slice::aligned, slice::begin, slice::correction, slice::delta, slice::dim,
      slice::first_lane, slice::range_of, slice::i, slice::lanes, slice::pieces, slice::rows,
      slice::sources, slice::weight, slice::width, slice::x;
  using typename slice::source_range;
  static constexpr index_t threads = Threads, chunk = Threads / Lanes;
  static constexpr index_t very_many = 128;          // sources
  static constexpr index_t looked_at = 4 * threads;  // rows at once
  struct shared_memory {
    shared_array<index_t, looked_at> ahead;  // rows; from the end on those of very many sources
    prefix_memory<threads> prefix;
    shared_array<float, threads / 32 * lanes * width> partial;
  };

  /// Rows that cannot wait for their chunk, or do not fit, into their anchors' slots.
  KVMELD_DEVICE void operator()(shared_memory& shared, ring& on_way) const {
    constexpr index_t each = looked_at / threads;
    for (index_t base = 0, turn = 0; base < rows; base += looked_at, turn ^= 1) {
      source_range of[each];
      KVMELD_UNROLL
      for (index_t u = 0; u < each; ++u) {
        of[u] = range_of(base + u * threads + thread_index());
      }
      unsigned some = 0, many = 0;  // a bit for each
      KVMELD_UNROLL
      for (index_t u = 0; u < each; ++u) {
        const index_t r = base + u * threads + thread_index();
        bool is = of[u].count > pieces;
        for (index_t e = 1; e < of[u].count && !is; ++e) {
          is = sources[of[u].begin + e].source < r / chunk * chunk;
        }
        many |= of[u].count > very_many ? 1U << u : 0U;
        some |= is && of[u].count <= very_many ? 1U << u : 0U;
      }
      const auto before = block_prefix(shared.prefix, turn, count_lanes(some), count_lanes(many));
      index_t at = before.a, at_end = looked_at - 1 - before.b;
      KVMELD_UNROLL
      for (index_t u = 0; u < each; ++u) {
        const index_t r = base + u * threads + thread_index();
        if ((some >> u & 1U) != 0) {
          shared.ahead[at++] = r;
        }
        if ((many >> u & 1U) != 0) {
          shared.ahead[at_end--] = r;
        }
      }
      sync_block();
      constexpr index_t of_warp = 32 / lanes;
      for (index_t k0 = warp() * of_warp; k0 < before.all_a; k0 += chunk) {
        const index_t k = k0 + lane() / lanes;
        const index_t r = k < before.all_a ? shared.ahead[k] : rows;
        const source_range own = range_of(r);
        float sum[width];
        KVMELD_UNROLL
        for (index_t j = 0; j < width; ++j) {
          sum[j] = r < rows ? correction(r, j) : 0.0F;
        }
        add_sources(on_way, sum, own.begin, own.begin + own.count, pieces);
        if (r < rows && i < dim) {
          store_row(x.at(sources[own.begin].source), i, dim, aligned, rounded<Scalar>(sum));
        }
      }
      for (index_t k = 0; k < before.all_b; ++k) {
        merge_by_block(shared, on_way, shared.ahead[looked_at - 1 - k]);
      }
      sync_block();
    }
  }

 private:
  /// Of four sources the one that this lane knows.
  struct known {
    index_t source = 0;
    float weight = 0;
  };
  KVMELD_DEVICE known look(index_t e, index_t end) const {
    const index_t k = lane() % lanes;
    if (k >= pieces || e + k >= end) {
      return {};
    }
    const merge_source* const own = sources + e + k;
    return {own->source, own->*weight};
  }
  /// Starts to copy sources `e ... e + 3`.
  KVMELD_DEVICE void copy(ring& on_way, index_t stage, const known& of, index_t e,
                          index_t end) const {
    KVMELD_UNROLL
    for (index_t k = 0; k < pieces; ++k) {
      const index_t source = shuffle(of.source, first_lane() + k);
      if (e + k < end && i < dim) {
        on_way.copy(stage, k, x.at(source), i, dim, aligned);
      }
    }
    commit_async();
  }

  /// Sources `e ... e + 3`, and so on every `step`-th four, by a row's lanes, of which the first
  /// four know one each. All lanes of a warp come here.
  KVMELD_DEVICE void add_sources(ring& on_way, float (&sum)[width], index_t e, index_t end,
                                 index_t step) const {
    constexpr index_t stages = ring::stages;
    known own[stages + 1];
    KVMELD_UNROLL
    for (index_t c = 0; c <= stages; ++c) {
      own[c] = look(e + c * step, end);
    }
    KVMELD_UNROLL
    for (index_t c = 0; c < stages; ++c) {
      copy(on_way, c, own[c], e + c * step, end);
    }
    for (index_t stage = 0; ballot(e < end) != 0; e += step, stage = ring::after(stage)) {
      wait_async<stages - 1>();
      KVMELD_UNROLL
      for (index_t k = 0; k < pieces; ++k) {
        const float w = shuffle(own[0].weight, first_lane() + k);
        if (e + k < end && i < dim) {
          add(sum, w, on_way.at(stage, k));
        }
      }
      KVMELD_UNROLL
      for (index_t c = 0; c < stages; ++c) {
        own[c] = own[c + 1];
      }
      copy(on_way, stage, own[stages - 1], e + stages * step, end);
      own[stages] = look(e + (stages + 1) * step, end);
    }
    wait_async<0>();
  }

  /// Four sources of every four times `chunk` a row's lanes; their sums over the warps, then of
  /// these.
  KVMELD_DEVICE void merge_by_block(shared_memory& shared, ring& on_way, index_t r) const {
    const index_t t = thread_index();
    float sum[width] = {};
    add_sources(on_way, sum, begin[r] + t / lanes * pieces, begin[r + 1], chunk * pieces);
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      for (index_t d = lanes; d < 32; d *= 2) {
        sum[j] += shuffle_xor(sum[j], d);
      }
      if (lane() < lanes) {
        shared.partial[(warp() * lanes + lane()) * width + j] = sum[j];
      }
    }
    sync_block();
    const index_t element = i - t % lanes * width + t;  // of the row; t: of the slice
    if (t < lanes * width && element < dim) {
      float all = delta == nullptr ? 0.0F : delta[std::ptrdiff_t{r} * dim + element];
      for (index_t k = 0; k < threads / 32; ++k) {
        all += shared.partial[k * lanes * width + t];
      }
      x.at(sources[begin[r]].source)[element] = from_float<Scalar>(all);
    }
    sync_block();
  }
};

}  // namespace kvmeld::cuda::detail
