/// Carrying out plans: rows, log-mass, positions and columns of all heads, in place.
#pragma once

#include "kvfold/cuda/device/block_collectives.cuh"
#include "kvfold/cuda/merge/apply_slices.cuh"

namespace kvfold::cuda {

namespace detail {

/// Carries out a plan: `apply_slices` for keys and values, and one more block a head for log-mass,
/// positions and columns, by the same chunks.
template <class Scalar, index_t Lanes>
struct apply_rows {
  using slice = apply_slices<Scalar, Lanes>;
  static constexpr index_t threads = slice::threads, resident = 2;
  struct shared_memory {
    typename slice::shared_memory rows;
    shared_array<unsigned, threads / 32> long_rows;  // a bit a row
    of_warps<float, threads> number;
  };

  cache_view<Scalar> cache;
  state_view state;
  plan_view plan;
  index_t slices;  // of a row
  bool aligned;

  /// Grid: heads; slices of keys, slices of values, records.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const auto part = static_cast<index_t>(block_index().y);
    const index_t rows = plan.rows[h];
    if (rows < 0) {
      return;
    }
    const merge_source* const sources = plan.sources + cache.slot(h, 0);
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    const auto take = [&](const plane<Scalar>& x, float merge_source::*weight, const float* delta,
                          index_t of) {
      const index_t i = (of * slice::lanes + thread_index() % slice::lanes) * slice::width;
      slice{{x.of(h), weight, delta == nullptr ? nullptr : delta + cache.slot(h, 0) * cache.dim,
             cache.dim, aligned, rows, begin, sources, i}}(shared.rows);
    };
    if (part == 2 * slices) {
      records(shared, h, rows, begin, sources);
    } else if (part < slices) {
      take(cache.keys, &merge_source::key_weight, plan.key_correction, part);
    } else {
      take(cache.values, &merge_source::value_weight, plan.value_correction, part - slices);
    }
  }

 private:
  /// Log-mass, position, columns: a thread a row, rows of very many sources by the block.
  KVFOLD_DEVICE void records(shared_memory& shared, index_t h, index_t rows, const index_t* begin,
                             const merge_source* sources) const {
    float* const log_mass = cache.log_mass + cache.slot(h, 0);
    index_t* const position = cache.position + cache.slot(h, 0);
    for (index_t r0 = 0; r0 < rows; r0 += threads) {
      const index_t r = r0 + thread_index();
      const index_t count = r < rows ? begin[r + 1] - begin[r] : 0;
      if (count > 0) {
        const index_t anchor = sources[begin[r]].source;
        log_mass[anchor] = plan.log_mass[cache.slot(h, r)];
        for (index_t c = 0; c < state.count && count <= slice::merges_ahead::very_many; ++c) {
          float* const column = state.column(c, h);
          float x = column[anchor];
          for (index_t e = begin[r] + 1; e < begin[r + 1]; ++e) {
            x = kvfold::detail::merged_column(state.merges[c], x, column[sources[e].source]);
          }
          column[anchor] = x;
        }
      }
      const unsigned many = ballot(count > slice::merges_ahead::very_many);
      if (lane() == 0) {
        shared.long_rows[warp()] = many;
      }
      sync_block();
      for (index_t w = 0; w < threads / 32; ++w) {
        for (unsigned bits = shared.long_rows[w]; bits != 0; bits &= bits - 1) {
          const index_t row = r0 + 32 * w + lowest_lane(bits);
          for (index_t c = 0; c < state.count; ++c) {
            merge_by_block(shared, state.merges[c], state.column(c, h), sources + begin[row],
                           begin[row + 1] - begin[row]);
          }
        }
      }
      sync_block();
    }
    for (index_t r0 = 0; r0 < rows; r0 += threads) {
      const index_t r = r0 + thread_index();
      const index_t from = r < rows ? sources[begin[r]].source : r;
      float mass = 0, numbers[max_columns] = {};
      index_t where = 0;
      if (from != r) {
        mass = log_mass[from], where = position[from];
        KVFOLD_UNROLL
        for (index_t c = 0; c < max_columns; ++c) {
          numbers[c] = c < state.count ? state.column(c, h)[from] : 0.0F;
        }
      }
      sync_block();
      if (from != r) {
        log_mass[r] = mass, position[r] = where;
        KVFOLD_UNROLL
        for (index_t c = 0; c < max_columns; ++c) {
          if (c < state.count) {
            state.column(c, h)[r] = numbers[c];
          }
        }
      }
    }
    if (thread_index() == 0) {
      cache.length[h] = rows;
    }
  }

  /// A column's numbers of very many sources, into the anchor's.
  KVFOLD_DEVICE static void merge_by_block(shared_memory& shared, column_merge how, float* column,
                                           const merge_source* sources, index_t count) {
    if (how == column_merge::anchor) {
      return;
    }
    float x = how == column_merge::sum ? 0.0F : column[sources[0].source];
    for (index_t e = thread_index(); e < count; e += threads) {
      x = kvfold::detail::merged_column(how, x, column[sources[e].source]);
    }
    x = how == column_merge::sum ? block_sum(shared.number, x) : block_max(shared.number, x);
    if (thread_index() == 0) {
      column[sources[0].source] = x;
    }
  }
};

template <index_t Lanes, class Scalar>
void apply_by(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
              stream stream) {
  using kernel = apply_rows<Scalar, Lanes>;
  constexpr index_t width = kernel::slice::lanes * kernel::slice::width;
  const index_t slices = (cache.dim + width - 1) / width;
  launch(kernel{cache, state, plan, slices, cache.aligned()},
         {cache.blocks(), static_cast<unsigned>(2 * slices + 1)}, stream);
}

}  // namespace detail

/// Makes every head what its plan says, in place and without scratch; lengths too stay on the
/// device. One launch. The plans' laws (`kvfold::check`) are the maker's duty: nothing here reads
/// them back. Refused on the host: views that do not fit.
template <class Scalar>
void apply(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
           stream stream) {
  check(cache), check(state, cache, 0, 0, "cuda apply"), check(plan, "cuda apply");
  // Memory likes long stretches of rows; few heads take more blocks.
  constexpr index_t wide = 16, row_bytes = wide * 16, enough_heads = 64;
  if (cache.blocks() >= enough_heads &&
      cache.dim * static_cast<index_t>(sizeof(Scalar)) >= row_bytes) {
    detail::apply_by<wide>(plan, cache, state, stream);
  } else {
    detail::apply_by<4>(plan, cache, state, stream);
  }
}

}  // namespace kvfold::cuda
