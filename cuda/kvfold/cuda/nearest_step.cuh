/// A step's third launch for D2O and KeepKV: what leaves goes into the nearest of all others.
#pragma once

#include "kvfold/cuda/departures.cuh"
#include "kvfold/cuda/joins.cuh"
#include "kvfold/cuda/memory.cuh"

namespace kvfold::cuda::detail {

/// D2O, eqs. 10–12, for one slot; the threshold is remembered.
template <class Scalar>
KVFOLD_DEVICE joining join_nearest(const absorb_rule& rule, const cache_view<Scalar>& cache,
                                   const head_context& head, index_t h, index_t into, index_t,
                                   float cosine) {
  const float now = rule.next_threshold(head, cosine);
  sync_block();  // all have read the old one
  if (thread_index() == 0 && cosine == cosine) {
    head.memory[absorb_rule::threshold] = now, head.memory[absorb_rule::has_threshold] = 1;
  }
  const float theirs = exponential(cosine), z = own_weight + theirs;
  return {!(cosine < now), own_weight / z, theirs / z, cache.log_mass[cache.slot(h, into)]};
}

/// KeepKV's merge of two; the merged slot's estimate is written.
template <class Scalar>
KVFOLD_DEVICE joining join_nearest(const vote_rule& rule, const cache_view<Scalar>&,
                                   const head_context& head, index_t, index_t into, index_t leaving,
                                   float cosine) {
  const auto same = [](double x) { return x; };
  const auto made = vote_merge::of(
      head, [&](auto take) { take(into), take(leaving); }, same, same);
  const joining how{cosine >= rule.similarity, made.share(head, into), made.share(head, leaving),
                    made.log_mass, made.key_scale};
  sync_block();  // all have read the members' estimates
  if (thread_index() == 0 && how.joins) {
    head.column(vote_rule::log_score, into) = made.score();
  }
  return how;
}

/// A block takes 256 slots of a head, whose keys it reads once: the most similar by cosine to the
/// one that leaves. The head's last block merges it into the best of all, or lets it go, and the
/// newest slot takes its place.
template <class Scalar, class Rule>
struct leave_for_nearest {
  static constexpr index_t threads = 256;
  static constexpr index_t width = vector_16<Scalar>::size;
  static constexpr index_t unroll = 4;
  struct shared_memory {
    of_warps<candidate, threads> best;
    shared_array<index_t, 1> ticket;
  };

  cache_view<Scalar> cache;
  state_view state;
  partial_attention from;
  Rule rule;
  bool aligned;

  /// Grid: heads, tiles of `slots_a_near_tile`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const auto h = static_cast<index_t>(block_index().x);
    const auto tile = static_cast<index_t>(block_index().y);
    const index_t leaving = from.victims[h];
    if (leaving < 0) {
      if (tile == 0 && thread_index() == 0 && cache.length[h] < cache.capacity) {
        count_slots(cache, h, cache.length[h] + 1);
      }
      return;
    }
    const index_t n = cache.length[h] + 1;
    const candidate mine = block_max(shared.best, nearest(h, tile, n, leaving));
    if (thread_index() == 0) {
      from.leaving[std::ptrdiff_t{h} * from.near_tiles + tile] = mine;
    }
    publish();
    sync_block();
    if (thread_index() == 0) {
      const index_t done = add_global(from.tickets + h, 1);
      shared.ticket[0] = done;
    }
    sync_block();
    publish();
    if (shared.ticket[0] != from.near_tiles - 1) {
      return;  // lengths change when all blocks of the head have read them
    }
    candidate best = 0;
    for (index_t t = thread_index(); t < from.near_tiles; t += threads) {
      const candidate c = from.leaving[std::ptrdiff_t{h} * from.near_tiles + t];
      best = c > best ? c : best;
    }
    best = block_max(shared.best, best);
    leave(h, n, leaving, best);
  }

 private:
  /// Every group of lanes takes `unroll` rows at once.
  KVFOLD_DEVICE candidate nearest(index_t h, index_t tile, index_t n, index_t leaving) const {
    const auto keys = cache.keys.of(h);
    const Scalar* const away = keys.at(leaving);
    index_t lanes = 1;  // of a row
    while (lanes < 32 && lanes * width < cache.dim) {
      lanes *= 2;
    }
    const index_t rows = 32 / lanes;
    candidate best = 0;
    const index_t begin = tile * slots_a_near_tile;
    const index_t end = begin + slots_a_near_tile < n ? begin + slots_a_near_tile : n;
    for (index_t base = begin + warp() * rows * unroll; base < end;
         base += threads / 32 * rows * unroll) {
      float dot[unroll] = {}, square[unroll] = {}, own = 0;
      for (index_t i = lane() % lanes * width; i < cache.dim; i += lanes * width) {
        const auto x = load_row(away, i, cache.dim, aligned);
        vector_16<Scalar> y[unroll];
        KVFOLD_UNROLL
        for (index_t u = 0; u < unroll; ++u) {
          const index_t s = base + u * rows + lane() / lanes;
          y[u] = load_row(keys.at(s < end ? s : leaving), i, cache.dim, aligned);
        }
        KVFOLD_UNROLL
        for (index_t j = 0; j < width; ++j) {
          const float a = to_float(x[j]);
          own += a * a;
          KVFOLD_UNROLL
          for (index_t u = 0; u < unroll; ++u) {
            const float b = to_float(y[u][j]);
            dot[u] += a * b, square[u] += b * b;
          }
        }
      }
      own = reduce_sum(own, lanes);
      KVFOLD_UNROLL
      for (index_t u = 0; u < unroll; ++u) {
        const index_t s = base + u * rows + lane() / lanes;
        const float norms = square_root(own) * square_root(reduce_sum(square[u], lanes));
        const float ab = reduce_sum(dot[u], lanes), cosine = norms > 0 ? ab / norms : 0.0F;
        const candidate c =
            s < end && s != leaving ? most_candidate(ordered(cosine), s) : candidate{0};
        best = c > best ? c : best;
      }
    }
    return best;
  }

  KVFOLD_DEVICE void leave(index_t h, index_t n, index_t leaving, candidate best) const {
    const head_context head = context_of(cache, state, h, 0);
    if (best != 0) {
      const index_t into = most_slot(best);
      const joining how = join_nearest(rule, cache, head, h, into, leaving,
                                       number_of(static_cast<unsigned>(best >> 32)));
      if (how.joins) {
        merge_slot<threads>(cache, state, head, h, into, leaving, how);
      }
    }
    if (leaving != n - 1) {
      move_slot<threads>(cache, state, head, h, leaving, n - 1, aligned);
    }
    if (thread_index() == 0) {
      from.tickets[h] = 0;
      count_slots(cache, h, n - 1);
    }
  }
};

}  // namespace kvfold::cuda::detail
