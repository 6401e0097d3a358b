/// Carrying out plans: rows, log-mass, positions and columns of all heads, in place.
#pragma once

#include "kvfold/cuda/memory/view.cuh"

namespace kvfold::cuda {

namespace detail {

/// Columns of a matrix of rows are independent of each other, in folding as in moving. So a block
/// takes a slice of 64 bytes of all rows of one head's keys or values, four lanes of 16 bytes a
/// row, and a barrier of its own is all the order there is:
///
///     fold    every row into its anchor's slot, which no other row reads
///     move    rows r0 ... r0 + n − 1 into registers, barrier, to their slots: anchors ascend and
///             are no lower than their rows, so what later rows still read lies above; the
///             thread that moves a row has folded it: no other barrier is needed
///
/// Reads 64 bytes of each source once and writes 64 of each row that moves; bytes of a row that
/// stays and is one unchanged slot are not touched. One more block a head does the same for
/// log-mass, positions and columns.
template <class Scalar>
struct apply_rows {
  static constexpr index_t threads = 256;
  static constexpr index_t lanes = 4;                  // of a row
  static constexpr index_t at_once = threads / lanes;  // rows
  static constexpr index_t unroll = 4;                 // rows a lane holds while moving
  static constexpr index_t width = vector_16<Scalar>::size;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  plan_view plan;
  index_t slices;  // of a row
  bool aligned;

  /// Grid: heads; slices of keys, slices of values, records.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const auto part = static_cast<index_t>(block_index().y);
    const index_t rows = plan.rows[h];
    if (rows < 0) {
      return;
    }
    const merge_source* const sources = plan.sources + cache.slot(h, 0);
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    if (part == 2 * slices) {
      records(h, rows, begin, sources);
    } else if (part < slices) {
      slice(cache.keys.of(h), &merge_source::key_weight, part, correction(plan.key_correction, h),
            rows, begin, sources);
    } else {
      slice(cache.values.of(h), &merge_source::value_weight, part - slices,
            correction(plan.value_correction, h), rows, begin, sources);
    }
  }

 private:
  KVFOLD_DEVICE const float* correction(const float* of_heads, index_t h) const {
    return of_heads == nullptr ? nullptr : of_heads + cache.slot(h, 0) * cache.dim;
  }

  KVFOLD_DEVICE void slice(const head_rows<Scalar>& x, float merge_source::*weight, index_t part,
                           const float* delta, index_t rows, const index_t* begin,
                           const merge_source* sources) const {
    const index_t i = (part * lanes + thread_index() % lanes) * width;  // of the row's elements
    const index_t first = thread_index() / lanes;
    if (i < cache.dim) {
      for (index_t r = first; r < rows; r += at_once) {
        fold(x, weight, i, delta == nullptr ? nullptr : delta + std::ptrdiff_t{r} * cache.dim,
             sources + begin[r], begin[r + 1] - begin[r]);
      }
    }
    for (index_t r0 = 0; r0 < rows; r0 += at_once * unroll) {
      vector_16<Scalar> held[unroll];
      index_t from[unroll];
      KVFOLD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t r = r0 + u * at_once + first;
        from[u] = r < rows && i < cache.dim ? sources[begin[r]].source : r;
        if (from[u] != r) {
          held[u] = load_row(x.at(from[u]), i, cache.dim, aligned);
        }
      }
      sync_block();  // all is folded, and read
      KVFOLD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t r = r0 + u * at_once + first;
        if (from[u] != r) {
          store_row(x.at(r), i, cache.dim, aligned, held[u]);
        }
      }
    }
  }

  /// `x ← Σ weight · row + delta` for 16 bytes of a row, summed in float in the plan's order.
  KVFOLD_DEVICE void fold(const head_rows<Scalar>& x, float merge_source::*weight, index_t i,
                          const float* delta, const merge_source* sources, index_t count) const {
    bool changes = count > 1 || sources[0].*weight != 1.0F;
    float sum[width];
    KVFOLD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      sum[j] = delta != nullptr && i + j < cache.dim ? delta[i + j] : 0.0F;
      changes = changes || sum[j] != 0.0F;
    }
    if (!changes) {
      return;
    }
    for (index_t e = 0; e < count; ++e) {
      const float w = sources[e].*weight;
      const auto y = load_row(x.at(sources[e].source), i, cache.dim, aligned);
      KVFOLD_UNROLL
      for (index_t j = 0; j < width; ++j) {
        sum[j] += w * to_float(y[j]);
      }
    }
    vector_16<Scalar> merged;
    KVFOLD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      merged[j] = from_float<Scalar>(sum[j]);
    }
    store_row(x.at(sources[0].source), i, cache.dim, aligned, merged);
  }

  /// Log-mass, position, columns: a thread a row.
  KVFOLD_DEVICE void records(index_t h, index_t rows, const index_t* begin,
                             const merge_source* sources) const {
    float* const log_mass = cache.log_mass + cache.slot(h, 0);
    index_t* const position = cache.position + cache.slot(h, 0);
    for (index_t r = thread_index(); r < rows; r += threads) {
      const index_t anchor = sources[begin[r]].source;
      log_mass[anchor] = plan.log_mass[cache.slot(h, r)];
      for (index_t c = 0; c < state.count; ++c) {
        float* const column = state.column(c, h);
        float x = column[anchor];
        for (index_t e = begin[r] + 1; e < begin[r + 1]; ++e) {
          x = kvfold::detail::merged_column(state.merges[c], x, column[sources[e].source]);
        }
        column[anchor] = x;
      }
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
};

}  // namespace detail

/// Makes every head what its plan says, in place and without scratch; lengths too stay on the
/// device. One launch. The plans' laws (`kvfold::check`) are the maker's duty: nothing here reads
/// them back. Refused on the host: views that do not fit.
template <class Scalar>
void apply(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
           stream stream) {
  check(cache), check(state, cache, 0, 0, "cuda apply"), check(plan, "cuda apply");
  using kernel = detail::apply_rows<Scalar>;
  const index_t slices =
      (cache.dim + kernel::lanes * kernel::width - 1) / (kernel::lanes * kernel::width);
  launch(kernel{cache, state, plan, slices, cache.aligned()},
         {cache.blocks(), static_cast<unsigned>(2 * slices + 1)}, stream);
}

}  // namespace kvfold::cuda
