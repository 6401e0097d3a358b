// SPDX-License-Identifier: MIT
/// A step of an engine that attends by itself: logits from its queries and log-sum-exp.
#pragma once

#include "kvmeld/cuda/merge/observe_and_remove.cuh"

namespace kvmeld::cuda {

/// What an engine's own decode attention leaves of a step, by place in the heads that a call runs.
/// The engine has written the new token's key and value at slot `length` of each head, and attended
/// `length + 1` slots, of which the last has a log-mass of 0. The call counts the slot.
template <class Scalar>
struct step_attention {
  const Scalar* queries = nullptr;  ///< [heads, group, dim]
  /// [heads, group] ln Σ_s exp(scale · q·k_s + log_mass_s), of capped logits, a sink's among them.
  const float* log_sum_exp = nullptr;
};

namespace detail {

/// Rows that a warp reads at once: `lanes` lanes share one, and every such group has several.
struct tile_rows {
  static constexpr index_t many = 4;

  index_t base, end;  ///< of the warp's; of the tile
  index_t lanes;

  KVMELD_DEVICE index_t slot(index_t u) const { return base + u * (32 / lanes) + lane() / lanes; }
};

/// `use(rows)` for all rows of a tile, by a block.
template <class Scalar, index_t Threads, class Use>
KVMELD_DEVICE void sweep_tile(const slot_tile& tile, index_t dim, Use use) {
  index_t lanes = 1;
  while (lanes < 32 && lanes * vector_16<Scalar>::size < dim) {
    lanes *= 2;
  }
  const index_t at_once = 32 / lanes * tile_rows::many;
  for (index_t base = tile.begin + warp() * at_once; base < tile.end;
       base += Threads / 32 * at_once) {
    use(tile_rows{base, tile.end, lanes});
  }
}

/// `ℓ_s = scale · q·k_s + log_mass_s` of a share of a head's slots, for `observe_and_remove`, which
/// makes `exp(ℓ − log-sum-exp)` of them. Reads K once, and from L1 per four query heads.
template <class Scalar>
struct step_logits {
  static constexpr index_t threads = 128, width = vector_16<Scalar>::size, heads = 4;
  struct shared_memory {
    shared_array<float, group_block * max_dim> queries;
  };

  cache_view<Scalar> cache;
  step_attention<row_number<Scalar>> from;
  partial_attention to;
  bool aligned;

  /// Grid: heads, shares of the slots, blocks of query heads.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    let_next_start();
    const index_t h = cache.head(), cached = cache.length[h], group = cache.group;
    const index_t place = place_of_block(), share = block_y(), g0 = block_z() * group_block;
    if (share == 0 && g0 == 0 && thread_index() < group) {
      const index_t g = place * group + thread_index();
      to.tickets[h] = 0, to.max[g] = from.log_sum_exp[g], to.sum[g] = 1;
    }
    if (to.logits == nullptr) {
      return;
    }
    const index_t pitch = (cache.dim + width - 1) / width * width;
    const index_t own_group = group - g0 < group_block ? group - g0 : group_block;
    for (index_t e = thread_index(); e < own_group * pitch; e += threads) {
      const index_t g = e / pitch, i = e % pitch;
      const std::ptrdiff_t row = (std::ptrdiff_t{place} * group + g0 + g) * cache.dim;
      shared.queries[e] = i < cache.dim ? to_float(from.queries[row + i]) : 0.0F;
    }
    sync_block();
    const slot_tile own = slot_tile::of(share, grid_y(), cached < cache.capacity ? cached + 1 : 0);
    sweep_tile<Scalar, threads>(own, cache.dim, [&](const tile_rows& rows) {
      for (index_t g = g0; g < g0 + own_group; g += heads) {
        write(shared, rows, h, cached, g, pitch);
      }
    });
  }

 private:
  /// Of query heads `g` to `g + 3`, by a warp.
  KVMELD_DEVICE void write(shared_memory& shared, const tile_rows& rows, index_t h, index_t cached,
                           index_t g, index_t pitch) const {
    constexpr index_t many = tile_rows::many;
    const auto keys = cache.keys.of(h);
    float dot[many][heads] = {};
    for (index_t i = lane() % rows.lanes * width; i < cache.dim; i += rows.lanes * width) {
      row_vector<Scalar> k[many];
      KVMELD_UNROLL
      for (index_t u = 0; u < many; ++u) {
        const index_t s = rows.slot(u);
        k[u] = load_row(keys.at(s < rows.end ? s : rows.base), i, cache.dim, aligned);
      }
      unrolled<width / 4, heads>([&](index_t j, index_t r) {
        const index_t first = (g + r < cache.group ? g + r : g) % group_block * pitch + i;
        const auto q = shared.queries.vector(first + 4 * j);
        unrolled<many, 4>(
            [&](index_t u, index_t e) { dot[u][r] += q[e] * to_float(k[u][4 * j + e]); });
      });
    }
    unrolled<many, heads>([&](index_t u, index_t r) {
      const index_t s = rows.slot(u);
      float x = reduce_sum(dot[u][r], rows.lanes);
      cap_products(cache, x);
      if (s < rows.end && g + r < cache.group && lane() % rows.lanes == r % rows.lanes) {
        const float mass = s < cached ? cache.log_mass_of(h)[s] : 0.0F;
        to.logits_of(cache, s)[g + r] = cache.scale * x + mass;
      }
    });
  }
};

/// What `attend_and_observe` does, but for the attention: two launches.
template <class Scalar, class Rule>
void observe_attended(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                      const step_attention<row_number<Scalar>>& attended,
                      const step_options& options, partial_attention partial, stream stream) {
  const auto shares = static_cast<unsigned>(partial.splits);
  partial.logits = Rule::observes ? partial.logits : nullptr, partial.splits = 1;
  launch(step_logits<Scalar>{cache, attended, partial, cache.aligned()},
         Rule::observes ? extent{cache.blocks(), shares, blocks_of(cache.group, group_block)}
                        : extent{cache.blocks()},
         stream);
  launch_early(
      observe_and_remove<Scalar, Rule>{cache, state, partial, rule, options, attended.queries,
                                       nullptr, nullptr, cache.aligned()},
      {cache.blocks(), static_cast<unsigned>(partial.tiles)}, stream);
}

}  // namespace detail

}  // namespace kvmeld::cuda
