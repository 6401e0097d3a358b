// SPDX-License-Identifier: MIT
/// EMS: how a head's table follows a plan, before it is applied.
#pragma once

#include "kvmeld/cuda/policies/ems/scores.cuh"

namespace kvmeld::cuda::detail {

/// Lists of tokens are joined as the plan's rows say; slots that go take theirs along. More tokens
/// than may share entries do not: those of least score make room, among equals the one later in the
/// table, which is in order of rows and of joining. Places are freed and taken in the order in
/// which the CPU does it one by one, so that tables are the same. A block a head.
///
///     freed    the lists of evicted slots, then tokens that make room, by score: each on top of
///     the last taken    from the top by the centres that join, then those free before, then new
///     ones
template <class Scalar>
struct carry_entries {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
    shared_array<index_t, 1> held;
  };

  cache_view<Scalar> cache;
  state_view state;
  ems_rule rule;
  plan_view plan;
  entry_scratch work;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t rows = plan.rows[h];
    if (rows < 0) {
      return;
    }
    const entry_table tokens = entry_table::of(cache, state, h, 0, work.places);
    const index_t n = cache.length[h];
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    const merge_source* const sources = plan.sources + cache.slot(h, 0);
    index_t* const mark = work.mark + work.at(h, 0);
    const index_t sharing = static_cast<index_t>(tokens.counted(entry_table::sharing));
    sync_block();  // all have read
    mark_members(mark, sources, begin, rows, n);
    const index_t dropped = free_lists(shared, tokens, mark, h, n);
    const index_t joining = begin[rows] - rows;
    const index_t most = rule.max_sharing(rows, work.places);
    const index_t more = sharing - dropped + joining - most;
    index_t freed = dropped;
    if (more > 0) {
      freed += make_room(shared, tokens, sources, begin[rows], mark, h, more, dropped);
    }
    take_places(shared, tokens, sources, begin[rows], mark, h, sharing, freed);
    join(tokens, sources, begin, rows, mark, h);
  }

 private:
  /// What becomes of a token, in `mark`.
  enum fate : index_t { dropped_token, moved, anchor, evicted };

  KVMELD_DEVICE static void mark_members(index_t* mark, const merge_source* sources,
                                         const index_t* begin, index_t rows, index_t n) {
    for (index_t s = thread_index(); s < n; s += threads) {
      mark[s] = evicted;
    }
    sync_block();
    for (index_t r = thread_index(); r < rows; r += threads) {
      for (index_t e = begin[r]; e < begin[r + 1]; ++e) {
        mark[sources[e].source] = e == begin[r] ? anchor : moved;
      }
    }
    sync_block();
  }

  /// Lists of slots that go, into `freed`. Returns how many tokens they hold.
  KVMELD_DEVICE index_t free_lists(shared_memory& shared, const entry_table& tokens,
                                   const index_t* mark, index_t h, index_t n) const {
    index_t* const to = work.freed + work.at(h, 0);
    return each_placed(
        shared.sort.prefix, n,
        [&](index_t s) { return mark[s] == evicted ? tokens.count(s) - 1 : 0; },
        [&](index_t s, index_t size, index_t at) {
          const index_t first = size > 0 ? tokens.after(s) : entry_table::none;
          tokens.each(first, [&](index_t t) { to[at++] = t; });
        });
  }

  /// The `more` of least score are removed: centres are marked, others taken out of their lists and
  /// put behind `freed`. Returns how many of these there are.
  KVMELD_DEVICE index_t make_room(shared_memory& shared, const entry_table& tokens,
                                  const merge_source* sources, index_t count, index_t* mark,
                                  index_t h, index_t more, index_t freed) const {
    index_t* const order = work.order + work.at(h, 0);
    const float* const score = work.score + work.at(h, 0);
    const auto own = [&](index_t e) {  // tokens of this source that may be removed
      return tokens.count(sources[e].source) - (mark[sources[e].source] == moved ? 0 : 1);
    };
    const index_t candidates = block_total(shared.sort.number, count, own);
    each_placed(shared.sort.prefix, count, own, [&](index_t e, index_t, index_t at) {
      const index_t s = sources[e].source;
      index_t place = candidates - at;  // the last comes first
      tokens.each(s, [&](index_t t) {
        if (t != s || mark[s] == moved) {
          order[--place] = t;
        }
        if (t != s) {
          mark[t] = anchor;  // it stays for now
        }
      });
    });
    const index_t* const least =
        block_sort(shared.sort, order, work.spare + work.at(h, 0), candidates, ~0U,
                   [&](index_t t) { return ordered(score[t]); });
    index_t* const to = work.freed + work.at(h, 0);
    const index_t places = each_placed(
        shared.sort.prefix, more, [&](index_t i) { return least[i] >= tokens.slots; },
        [&](index_t i, index_t is, index_t at) {
          if (is != 0) {
            to[freed + at] = least[i];
          }
          mark[least[i]] = dropped_token;
        });
    for (index_t e = thread_index(); e < count; e += threads) {
      for (index_t t = sources[e].source; t != entry_table::none; t = tokens.after(t)) {
        index_t next = tokens.after(t);
        while (next != entry_table::none && mark[next] == dropped_token) {
          next = tokens.after(next);
        }
        tokens.at(entry_table::next, t) = tokens.link_of(next);
      }
    }
    return places;
  }

  /// The freed become one list; every centre that joins gets a place, in `order` by source.
  KVMELD_DEVICE void take_places(shared_memory& shared, const entry_table& tokens,
                                 const merge_source* sources, index_t count, const index_t* mark,
                                 index_t h, index_t sharing, index_t freed) const {
    index_t* const place = work.order + work.at(h, 0);
    const index_t* const free = work.freed + work.at(h, 0);
    const index_t wanted = each_placed(
        shared.sort.prefix, count, [&](index_t e) { return mark[sources[e].source] == moved; },
        [&](index_t e, index_t joins, index_t k) {
          if (joins != 0) {  // or a number, for those that are not freed now
            place[e] = k < freed ? free[freed - 1 - k] : -2 - (k - freed);
          }
        });
    index_t* const older = work.spare + work.at(h, 0);  // free before
    const index_t used = static_cast<index_t>(tokens.counted(entry_table::used));
    if (thread_index() == 0) {
      index_t top = tokens.token_of(tokens.counted(entry_table::free)), held = 0;
      for (; top != entry_table::none && held < wanted - freed; ++held) {
        older[held] = top, top = tokens.after(top);
      }
      shared.held[0] = held;
    }
    sync_block();
    const index_t held = shared.held[0], left = freed - wanted > 0 ? freed - wanted : 0;
    for (index_t e = thread_index(); e < count; e += threads) {
      if (mark[sources[e].source] == moved && place[e] < 0) {
        const index_t k = -2 - place[e];
        place[e] = k < held ? older[k] : tokens.slots + used + k - held;
      }
    }
    for (index_t i = thread_index() + 1; i < left; i += threads) {
      tokens.at(entry_table::next, free[i]) = tokens.link_of(free[i - 1]);
    }
    if (thread_index() == 0) {
      float& top = tokens.counted(entry_table::free);
      if (left > 0) {
        tokens.at(entry_table::next, free[0]) = top;
        top = tokens.link_of(free[left - 1]);
      } else if (held > 0) {
        top = tokens.at(entry_table::next, older[held - 1]);
      }
      const index_t fresh = wanted - freed - held;
      tokens.counted(entry_table::used) += static_cast<float>(fresh > 0 ? fresh : 0);
      tokens.counted(entry_table::sharing) = static_cast<float>(sharing - freed + wanted);
    }
    sync_block();
  }

  /// A thread a row.
  KVMELD_DEVICE void join(const entry_table& tokens, const merge_source* sources,
                          const index_t* begin, index_t rows, const index_t* mark,
                          index_t h) const {
    const index_t* const place = work.order + work.at(h, 0);
    for (index_t r = thread_index(); r < rows; r += threads) {
      index_t end = begin[r + 1] - begin[r] > 1 ? tokens.last(sources[begin[r]].source) : 0;
      for (index_t e = begin[r] + 1; e < begin[r + 1]; ++e) {
        const index_t s = sources[e].source;
        end = tokens.join(end, s, mark[s] == moved ? place[e] : entry_table::none);
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
