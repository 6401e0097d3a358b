// SPDX-License-Identifier: MIT
/// EMS: the scores of tokens, the weights of entries, and which slots are centres.
#pragma once

#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/policies/ems/attention.cuh"
#include "kvmeld/cuda/policies/ems/rule.cuh"

namespace kvmeld::cuda::detail {

/// Every token's score, after a prompt averaged over `kernel` neighbours in position, outside the
/// window, and every entry's sum of them. A block a head, a thread an entry; after a prompt its
/// tokens are walked along twice more.
template <class Scalar>
struct weigh_entries {
  static constexpr index_t threads = 512, resident = 2;
  struct shared_memory {
    sort_memory<threads> sort;
    of_warps<double, threads> sum;
  };

  cache_view<Scalar> cache;
  state_view state;
  ems_rule rule;
  head_budgets limits;
  entry_scratch to;
  bool prompt;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h];
    if (!limits.of(h).reached(n) || n > cache.capacity) {
      return;
    }
    const entry_table tokens =
        entry_table::of(cache, state, h, newest_of(shared.sort.number, cache, h, n), to.places);
    score_tokens(shared.sum, tokens, to, h, n);
    if (prompt) {
      pool(shared, tokens, h, n);
      const float* const score = to.score + to.at(h, 0);
      sum_of_tokens<threads>(tokens, to.weight + cache.slot(h, 0), n,
                             [&](index_t t) { return score[t]; });
    }
  }

 private:
  /// Tokens in the window come last in the order of positions.
  KVMELD_DEVICE void pool(shared_memory& shared, const entry_table& tokens, index_t h,
                          index_t n) const {
    index_t* const order = to.order + to.at(h, 0);
    float* const raw = to.raw + to.at(h, 0);
    float* const score = to.score + to.at(h, 0);
    const protection in_window{0, rule.window, tokens.head.newest};
    index_t outside = 0, most = 0;
    const index_t count = each_placed(
        shared.sort.prefix, n, [&](index_t s) { return tokens.count(s); },
        [&](index_t s, index_t, index_t at) {
          tokens.each(s, [&](index_t t) {
            const index_t p = tokens.position(t);
            order[at++] = t, raw[t] = score[t];
            outside += in_window(p) ? 0 : 1;
            most = p > most ? p : most;
          });
        });
    outside = block_sum(shared.sort.number, outside), most = block_max(shared.sort.number, most);
    const index_t* const by_position =
        block_sort(shared.sort, order, to.spare + to.at(h, 0), count, static_cast<unsigned>(most),
                   [&](index_t t) { return static_cast<unsigned>(tokens.position(t)); });
    for (index_t i = thread_index(); i < outside; i += threads) {
      score[by_position[i]] = pooled(raw, by_position, outside, i, rule.kernel);
    }
    sync_block();
  }
};

/// Which slots of a head are centres (`kept`, in the order of positions), to be merged (`removed`)
/// and evicted: those that do not stay alone by weight, among equals the earlier token first,
/// wherever it lies. A block a head.
template <class Scalar>
struct divide_entries {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
  };

  cache_view<Scalar> cache;
  state_view state;
  ems_rule rule;
  head_budgets limits;
  entry_scratch from;
  keep_evict_partition to;
  bool prompt;  // what is beyond the band goes

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], target = limits.of(h).slots;
    if (!limits.of(h).reached(n) || n > cache.capacity) {
      if (thread_index() == 0) {
        to.none(h);
      }
      return;
    }
    const index_t* const position = cache.position_of(h);
    const index_t newest = newest_of(shared.sort.number, cache, h, n);
    const head_context head = context_of(cache, state, h, newest);
    index_t* const order = from.order + from.at(h, 0);
    const index_t others = each_placed(
        shared.sort.prefix, n, [&](index_t s) { return !rule.is_protected(head, s); },
        [&](index_t s, index_t other, index_t at) {
          to.into[cache.slot(h, s)] = other != 0 ? keep_evict_partition::evicted : s;
          if (other != 0) {
            order[at] = s;
          }
        });
    index_t* const spare = from.spare + from.at(h, 0);
    index_t* const by_position =
        block_sort(shared.sort, order, spare, others, static_cast<unsigned>(newest),
                   [&](index_t s) { return static_cast<unsigned>(position[s]); });
    index_t* const in_order = from.freed + from.at(h, 0);
    for (index_t i = thread_index(); i < others; i += threads) {
      in_order[i] = by_position[i];
    }
    const float* const weight = from.weight + cache.slot(h, 0);
    const index_t* const ranked =
        block_sort(shared.sort, by_position, by_position == order ? spare : order, others, ~0U,
                   [&](index_t s) { return ~ordered(weight[s]); });
    const index_t centres = target - (n - others);
    const float band = prompt ? rule.gamma - 1 : static_cast<float>(n);
    const double wanted = static_cast<double>(band) * centres + 0.5;
    const index_t most = n - target, merged = wanted < most ? static_cast<index_t>(wanted) : most;
    for (index_t i = thread_index(); i < centres + merged; i += threads) {
      if (i < centres) {
        to.into[cache.slot(h, ranked[i])] = ranked[i];
      } else {
        to.evict(cache, h, ranked[i], i - centres);
      }
    }
    sync_block();
    each_placed(
        shared.sort.prefix, others,
        [&](index_t i) { return to.into[cache.slot(h, in_order[i])] == in_order[i]; },
        [&](index_t i, index_t centre, index_t at) {
          if (centre != 0) {
            to.kept[cache.slot(h, at)] = in_order[i];
          }
        });
    if (thread_index() == 0) {
      to.end(cache, h, centres, merged);
    }
  }
};

}  // namespace kvmeld::cuda::detail
