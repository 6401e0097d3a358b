// SPDX-License-Identifier: MIT
/// EMS in a step: the entry of least score joins the centre most like it, or is evicted.
#pragma once

#include <type_traits>  // std::remove_cvref_t

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/merge/slot_removals.cuh"
#include "kvmeld/cuda/policies/ems/match.cuh"
#include "kvmeld/cuda/policies/ems/rule.cuh"
#include "kvmeld/cuda/search/nearest_tile.cuh"

namespace kvmeld::cuda::detail {

/// Where attention did not find the removed entry's centre, a block takes a tile of a
/// head's slots, whose keys and values it reads once: the most redundant to the removed one, ties
/// to the earlier token. One block a head removes the least tokens where there is no room, joins
/// the two or evicts the entry, and moves the newest slot into its place.
template <class Scalar, class Search>
struct remove_into_centre {
  static constexpr index_t threads = Search::threads, resident = Search::resident;
  struct shared_memory {
    typename Search::shared_memory search;
    of_warps<candidate, threads> best;
    of_warps<index_t, threads> number;
    shared_array<index_t, 1> ticket;
  };

  cache_view<Scalar> cache;
  state_view state;
  partial_attention from;
  ems_rule rule;
  entry_scratch entries;
  Search search;

  /// Grid: heads, tiles.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    wait_for_previous();
    const index_t h = cache.head();
    const auto tile = block_y();
    const index_t removed = from.victims[h];
    if (removed < 0) {
      return;
    }
    best_of_all best{true, from.found[h]};
    if (best.of != 0 && tile > 0) {
      return;
    }
    const index_t n = cache.length[h];
    if (best.of == 0) {
      const entry_masses entry = rule.masses(state, cache.stride());
      const index_t newest = cache.position_of(h)[n - 1];
      best = best_of_tiles(
          shared.ticket, shared.best, from.tickets + h, from.best_of(h), tile, from.near_tiles,
          search(shared.search, h, slot_tile::of(tile, from.near_tiles, n, 16), removed,
                 [&](index_t position) { return entry.is_centre(position, newest); }));
    }
    if (best.last) {
      const entry_table tokens = entry_table::of(cache, state, h, 0, entries.places);
      remove(shared, tokens, h, n, removed, best.of);
    }
  }

 private:
  KVMELD_DEVICE void remove(shared_memory& shared, const entry_table& tokens, index_t h, index_t n,
                            index_t removed, candidate best) const {
    const bool joins = best != 0 && number_of(static_cast<unsigned>(best >> 32)) >= rule.threshold;
    index_t into = -1;
    for (index_t s = thread_index(); s < n && joins; s += threads) {
      into = tokens.head.position[s] == most_slot(best) ? s : into;
    }
    into = block_max(shared.number, into);
    const bool along = make_room(shared, tokens, h, n, removed, into);
    if (thread_index() == 0) {
      if (joins) {
        const index_t end = tokens.last(into);
        tokens.join(end, removed, along ? tokens.take_place() : entry_table::none);
      }
    }
    if (joins) {
      merge_slot<threads>(cache, state, tokens.head, h, into, removed,
                          joined(tokens, h, into, removed));
    }
    if (removed != n - 1) {
      move_slot<threads>(cache, state, tokens.head, h, removed, n - 1);
    }
    if (thread_index() == 0) {
      cache.length[h] = n - 1;
    }
  }

  /// Tokens of least score are removed while more would share entries than may; among equals the
  /// one later in the table, where those of `removed` come behind those of `into`. Returns whether
  /// the centre of `removed` keeps a place.
  KVMELD_DEVICE bool make_room(shared_memory& shared, const entry_table& tokens, index_t h,
                               index_t n, index_t removed, index_t into) const {
    if (thread_index() == 0 && into < 0) {
      while (tokens.shared(removed)) {
        tokens.remove_after(removed);
      }
    }
    sync_block();
    bool along = into >= 0;
    const index_t most = rule.max_sharing(n - 1, entries.places);
    index_t more =
        static_cast<index_t>(tokens.counted(entry_table::sharing)) + (along ? 1 : 0) - most;
    sync_block();  // all have read
    for (; more > 0; --more) {
      const auto each_candidate = [&](auto see) {  // see(score, place in the table)
        for (index_t s = thread_index(); s < n; s += threads) {
          const bool is_removed = s == removed;
          candidate place = static_cast<candidate>(is_removed ? into : s) << 32 |
                            static_cast<unsigned>(is_removed ? tokens.names() : 0);
          tokens.each(s, [&](index_t t) {
            if (t != s || (is_removed && along)) {
              see(ordered(entries.score[entries.at(h, t)]), place);
            }
            ++place;
          });
        }
      };
      candidate lowest = 0, last = 0;
      each_candidate([&](unsigned score, candidate) {
        const candidate c = least_candidate(score, 0);
        lowest = c > lowest ? c : lowest;
      });
      lowest = block_max(shared.best, lowest);
      each_candidate([&](unsigned score, candidate place) {
        last = least_candidate(score, 0) == lowest && place > last ? place : last;
      });
      last = block_max(shared.best, last);
      const auto row = static_cast<index_t>(last >> 32);
      auto step = static_cast<index_t>(last & 0xffffffffU);
      const bool of_removed = step >= tokens.names();
      step -= of_removed ? tokens.names() : 0;
      if (of_removed && step == 0) {
        along = false;
      } else if (thread_index() == 0) {
        index_t before = of_removed ? removed : row;
        for (; step > 1; --step) {
          before = tokens.after(before);
        }
        tokens.remove_after(before);
      }
      sync_block();
    }
    return along;
  }

  KVMELD_DEVICE joining joined(const entry_table& tokens, index_t h, index_t into,
                               index_t removed) const {
    const float* const weight = entries.weight + cache.slot(h, 0);
    const float lengths[2] = {length(cache.keys.of(h).at(into)),
                              length(cache.keys.of(h).at(removed))};
    const auto made = entry_merge::of<1>(
        cache, h, 2, tokens.at(entry_table::norm, into),
        [&](index_t i) { return i == 0 ? into : removed; }, [&](index_t s) { return weight[s]; },
        [&](index_t s) { return s == into ? lengths[0] : lengths[1]; });
    const merge_source kept = made.of_member(into, true, weight[into], lengths[0]);
    const merge_source merged = made.of_member(removed, false, weight[removed], lengths[1]);
    return {true,
            {kept.key_weight, merged.key_weight},
            {kept.value_weight, merged.value_weight},
            cache.log_mass_of(h)[into]};
  }

  /// By a warp.
  KVMELD_DEVICE float length(const Scalar* row) const {
    float sum = 0;
    for (index_t i = lane(); i < cache.dim; i += 32) {
      sum += to_float(row[i]) * to_float(row[i]);
    }
    return square_root(reduce_sum(sum));
  }
};

/// One launch, early, for the heads that the step runs.
template <class Scalar>
void remove_entry(const ems_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                  const step_memory<ems_rule>& work, stream stream) {
  with_search<centres_in_tiles>(
      cache, work.partial, [&](const auto& search, const partial_attention& from) {
        using kernel = remove_into_centre<Scalar, std::remove_cvref_t<decltype(search)>>;
        launch_early(kernel{cache, state, from, rule, work.plan.entries, search},
                     {cache.blocks(), blocks_of(from.near_tiles)}, stream);
      });
}

}  // namespace kvmeld::cuda::detail
