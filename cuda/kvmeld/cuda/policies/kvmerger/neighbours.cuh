// SPDX-License-Identifier: MIT
/// KVMerger: neighbours in position, and how similar their keys are.
#pragma once

#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"

namespace kvmeld::cuda {

/// KVMerger: sums as H2O's; runs of neighbours merge, several slots at once always. A plan selects
/// those that take no part: the last, and the sinks and the best of the others together.
struct kvmerger_rule : sum_rule {
  static constexpr bool merges = true, always_plans = true;
  float heavy = 0;  ///< of the target, at least the sinks
  bool by_threshold = false;
  float epsilon = 0.75F, sigma = 0;
  bool scale_values = false, gaps_break = true;
  index_t places = 0;  ///< of the best and the sinks, in a plan

  KVMELD_DEVICE void of_target(index_t target) {
    sum_rule::of_target(target);
    const index_t share = share_of(heavy, target);
    places = share > sinks ? share : sinks;
  }
  /// Sinks that are not among the last take places of the best.
  KVMELD_DEVICE bool counted(const head_context& head, index_t s) const {
    return is_protected(head, s) && !protection{0, latest, head.newest}(head.position[s]);
  }
  KVMELD_DEVICE void prepare(index_t taken) { places = places > taken ? places - taken : 0; }
  KVMELD_DEVICE index_t free(index_t, index_t) const { return places; }
};

}  // namespace kvmeld::cuda

namespace kvmeld::cuda::detail {

/// All slots by position, into `kept`, a block a head. Those that were selected take no part:
/// `fresh` in their own `into`.
template <class Scalar>
struct order_by_position {
  static constexpr index_t threads = 512;
  static constexpr index_t own = 8;  // slots of a thread in flight at once
  struct shared_memory {
    sort_memory<threads> sort;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    const index_t* const position = cache.position_of(h);
    index_t* const order = of.removed + cache.slot(h, 0);
    index_t* const into = of.into + cache.slot(h, 0);
    index_t most = 0;
    for (index_t base = thread_index(); base < n; base += threads * own) {
      index_t to[own];
      unrolled<own>([&](index_t u) {
        const index_t s = base + u * threads;
        const index_t p = s < n ? position[s] : 0;
        to[u] = s < n ? into[s] : 0;
        most = p > most ? p : most;
      });
      unrolled<own>([&](index_t u) {
        if (const index_t s = base + u * threads; s < n) {
          order[s] = s;
          into[s] = to[u] == s ? s | keep_evict_partition::fresh : s;
        }
      });
    }
    most = block_max(shared.sort.number, most);
    const index_t* const sorted = block_sort(
        shared.sort, order, of.nearest.into + cache.slot(h, 0), n, static_cast<unsigned>(most),
        [&](index_t s) { return static_cast<unsigned>(position[s]); });
    for (index_t i = thread_index(); i < n; i += threads) {
      of.kept[cache.slot(h, i)] = sorted[i];
    }
    if (thread_index() == 0) {
      of.removed_count[h] = 0;  // no slot is matched
    }
  }
};

/// `cos(k_a, k_b)` of every two neighbours in position that may join (algorithm 1), by the left
/// slot: `nearest.into` says the right one, −1 where none may. A warp has the keys of five slots on
/// their way for four pairs, so K is read 1.25 times.
template <class Scalar>
struct pair_cosines {
  static constexpr index_t threads = 256, resident = 2;
  static constexpr index_t own = 4;                     // pairs of a warp
  static constexpr index_t pairs = threads / 32 * own;  // a block
  static constexpr index_t width = vector_16<Scalar>::size;
  struct shared_memory {};

  cache_view<Scalar> cache;
  keep_evict_partition of;
  bool gaps_break;
  bool aligned;

  /// Grid: heads, stretches of `pairs`.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    const index_t begin = block_y() * pairs + warp() * own;
    if (begin >= n) {
      return;
    }
    const std::ptrdiff_t first = cache.slot(h, 0);
    index_t slot[own + 1], position[own + 1];
    bool joins[own + 1];
    unrolled<own + 1>(
        [&](index_t k) { slot[k] = of.kept[first + (begin + k < n ? begin + k : n - 1)]; });
    unrolled<own + 1>([&](index_t k) {
      joins[k] = begin + k < n && (of.into[first + slot[k]] & keep_evict_partition::fresh) == 0;
      position[k] = cache.position_of(h)[slot[k]];
    });
    unrolled<own>([&](index_t k) {
      joins[k] = joins[k] && joins[k + 1] && (!gaps_break || position[k + 1] == position[k] + 1);
    });
    float product[own] = {}, square[own + 1] = {};
    add_products(h, slot, joins, product, square);
    unrolled<own + 1>([&](index_t k) { square[k] = square_root(reduce_sum(square[k])); });
    unrolled<own>([&](index_t k) {
      const float norms = square[k] * square[k + 1], ab = reduce_sum(product[k]);
      if (lane() == 0 && begin + k < n) {
        of.nearest.into[first + slot[k]] = joins[k] ? slot[k + 1] : -1;
        of.nearest.similarity[first + slot[k]] = norms > 0 ? ab / norms : 0.0F;
      }
    });
  }

 private:
  /// This lane's share of the products of pairs that may join, and of the squares of their keys.
  KVMELD_DEVICE void add_products(index_t h, const index_t (&slot)[own + 1],
                                  const bool (&joins)[own + 1], float (&product)[own],
                                  float (&square)[own + 1]) const {
    const auto keys = cache.keys.of(h);
    for (index_t e = lane() * width; e < cache.dim; e += 32 * width) {
      row_vector<Scalar> x[own + 1];
      unrolled<own + 1>([&](index_t k) {
        if ((k < own && joins[k]) || (k > 0 && joins[k - 1])) {
          x[k] = load_row(keys.at(slot[k]), e, cache.dim, aligned);
        }
      });
      unrolled<own + 1>([&](index_t k) {
        const bool left = k < own && joins[k], right = k > 0 && joins[k - 1];
        unrolled<width>([&](index_t j) {
          if (left || right) {
            square[k] += to_float(x[k][j]) * to_float(x[k][j]);
          }
          if (right) {
            product[k - 1] += to_float(x[k - 1][j]) * to_float(x[k][j]);
          }
        });
      });
    }
  }
};

}  // namespace kvmeld::cuda::detail
