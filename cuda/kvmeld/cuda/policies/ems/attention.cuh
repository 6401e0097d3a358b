// SPDX-License-Identifier: MIT
/// EMS: attention over entries that tokens share, and what it adds to the tokens' scores.
#pragma once

#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/policies/ems/rule.cuh"
#include "kvmeld/cuda/score/queries.cuh"

namespace kvmeld::cuda::detail {

/// Lengths of keys and of values, norms of tokens that were not measured yet, and as floats keys as
/// they were before RoPE, with their values. A warp a slot; reads K and V once.
template <class Scalar>
struct measure_entries {
  static constexpr index_t threads = 256;
  static constexpr index_t slots = 64;  // a block
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  ems_rule rule;
  head_budgets limits;
  float *key_length, *value_length;  // [heads, capacity], or null: norms alone
  float* turned;                     // [heads, capacity, 2, pitch], or null
  index_t pitch;
  bool aligned;

  /// Grid: heads, stretches of `slots`.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t begin = block_y() * slots, n = cache.length[h];
    if (!limits.of(h).reached(n) || n > cache.capacity) {
      return;
    }
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    const head_context head = context_of(cache, state, h, 0);
    for (index_t s = begin + warp(); s < n && s < begin + slots; s += threads / 32) {
      const float key = length(keys.at(s));
      if (lane() == 0 && head.column(entry_table::norm, s) < 0) {
        head.column(entry_table::norm, s) = key;
      }
      if (key_length != nullptr) {
        const float value = length(values.at(s));
        if (lane() == 0) {
          key_length[cache.slot(h, s)] = key, value_length[cache.slot(h, s)] = value;
        }
      }
      if (turned != nullptr) {
        float* const row = turned + cache.slot(h, s) * 2 * pitch;
        for (index_t p = lane(); p < rope_params::pairs(cache.dim); p += 32) {
          rule.turn.pair(keys.at(s), cache.dim, p, -head.position[s],
                         [&](index_t i, float x) { row[i] = x; });
        }
        for (index_t i = lane(); i < cache.dim; i += 32) {
          row[pitch + i] = to_float(values.at(s)[i]);
        }
      }
    }
  }

 private:
  KVMELD_DEVICE float length(const Scalar* row) const {
    return square_root(square_of(row, cache.dim, aligned));
  }
};

/// How many of a call's last queries count in the tokens' scores.
struct credited_queries {
  index_t all;   ///< in that of all queries
  index_t late;  ///< in that of the window
};

/// A prompt's attention into the tokens' scores; the windows begin anew. Of a head whose tokens all
/// stand alone: `total` and `last`, the column sums. Otherwise a warp a slot, a lane a query, token
/// by token: exp(ℓ_t − lse) of those that see the entry's centre. Reads K once, Q once a slot.
template <class Scalar>
struct credit_tokens {
  static constexpr index_t threads = 256;
  static constexpr index_t slots = threads / 32;  // a block
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  query_rows<Scalar> queries;
  group_combine combine;
  index_t places;
  credited_queries counts;
  const float *total, *last;  // [heads, capacity]
  const float* log_sum_exp;   // [heads, group, count]
  bool aligned;

  /// Grid: heads, stretches of `slots`.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t s = block_y() * slots + warp();
    const entry_table tokens = entry_table::of(cache, state, h, 0, places);
    if (s >= cache.length[h]) {
      return;
    }
    if (s == 0 && lane() == 0) {
      tokens.counted(entry_table::window_count) = 0;
    }
    const bool alone = tokens.counted(entry_table::sharing) == 0;
    if (lane() == 0) {
      tokens.each(s, [&](index_t t) {
        tokens.at(entry_table::past, t) = tokens.at(entry_table::current, t) = 0;
        take(tokens, t, alone ? total[cache.slot(h, s)] : 0.0F,
             alone ? last[cache.slot(h, s)] : 0.0F);
      });
    }
    for (index_t i0 = 0; !alone && i0 < queries.count; i0 += 32) {
      add_query(tokens, h, s, i0 + lane());
    }
  }

 private:
  KVMELD_DEVICE static void take(const entry_table& tokens, index_t t, float a, float late) {
    tokens.at(entry_table::all, t) += a;
    tokens.at(entry_table::past, t) += late;
  }

  KVMELD_DEVICE void add_query(const entry_table& tokens, index_t h, index_t s, index_t i) const {
    const bool sees = i < queries.count &&
                      tokens.head.position[s] <= queries.position_of(h, i, cache.next_position[h]);
    const bool shared = tokens.shared(s), counted = i >= queries.count - counts.all,
               late = i >= queries.count - counts.late;
    float slope[group_block], log_sum[group_block];
    unrolled<group_block>([&](index_t g) {
      slope[g] = 0, log_sum[g] = lowest_score;
      if (sees && g < cache.group) {
        const float x = dot(queries.at(h, g, i), cache.keys.of(h).at(s));
        slope[g] = shared ? entry_slope(tokens, s, cache.scale, x)
                          : cache.scale * x + tokens.head.log_mass[s];
        log_sum[g] = log_sum_exp[(std::ptrdiff_t{h} * cache.group + g) * queries.count + i];
      }
    });
    tokens.each(s, [&](index_t t) {
      const float norm = shared ? tokens.at(entry_table::norm, t) : 1.0F;
      float a = 0;
      unrolled<group_block>([&](index_t g) {
        const float p =
            log_sum[g] == lowest_score ? 0.0F : exponential(slope[g] * norm - log_sum[g]);
        a = combine != group_combine::max ? a + p : p > a ? p : a;
      });
      a = combine == group_combine::mean ? a / static_cast<float>(cache.group) : a;
      const float sum = reduce_sum(counted ? a : 0.0F), of_late = reduce_sum(late ? a : 0.0F);
      if (lane() == 0) {
        take(tokens, t, sum, of_late);
      }
    });
  }

  KVMELD_DEVICE float dot(const Scalar* query, const Scalar* key) const {
    constexpr index_t width = vector_16<Scalar>::size;
    float sum = 0;
    for (index_t i = 0; i < cache.dim; i += width) {
      const auto x = load_row(query, i, cache.dim, aligned);
      const auto y = load_row(key, i, cache.dim, aligned);
      unrolled<width>([&](index_t j) { sum += to_float(x[j]) * to_float(y[j]); });
    }
    return sum;
  }
};

}  // namespace kvmeld::cuda::detail
