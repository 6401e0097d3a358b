// SPDX-License-Identifier: MIT
/// ZSMerge as the kernels know it, and its residual slots in a step.
#pragma once

#include "kvmeld/cuda/merge/float_rows.cuh"
#include "kvmeld/cuda/merge/slot_removals.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda {

/// ZSMerge: decayed sums; an evicted slot merges into the nearest residual slot by dot product. Its
/// plans depend on how many residual slots there are already (`counted`): those missing are made.
struct zsmerge_rule {
  static constexpr index_t columns = 3, observed_columns = 1;
  static constexpr bool observes = true, evicts = true, merges = true, merges_removed = true;
  enum column_name : index_t { score, count, is_residual };
  group_combine combine = group_combine::sum;
  index_t sinks = 4;
  float proximity = 0;  ///< of the target, at least 2 tokens: the ring
  index_t residual = 1;
  float decay = 0.98F, alpha = 0.6F;
  bool new_token_competes = true;
  bool chunked = true;            ///< of the prompt's modes
  index_t ring = 2, context = 0;  ///< context: target − ring − residual
  index_t missing = 0;            ///< residual slots, in a plan

  KVMELD_DEVICE void of_target(index_t target) {
    const index_t share = share_of(proximity, target);
    ring = share < 2 ? 2 : share;
    context = target - ring - residual;
  }
  KVMELD_DEVICE bool counted(const head_context& head, index_t s) const {
    return head.column(is_residual, s) != 0.0F;
  }
  KVMELD_DEVICE void prepare(index_t residuals) {
    missing = residual - residuals;
    new_token_competes = new_token_competes || missing != 0;
  }
  /// Places for scores, when `stay` slots are protected.
  KVMELD_DEVICE index_t free(index_t target, index_t stay) const { return target - missing - stay; }
  KVMELD_DEVICE float observe(const head_context&, float* column, float a) const {
    return column[score] = score::accumulated(column[score], a, decay);
  }
  KVMELD_DEVICE void observed(const head_context&) const {}
  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    const index_t latest = ring + (new_token_competes ? 0 : 1);
    return protection{sinks, latest, head.newest}(head.position[s]) ||
           head.column(is_residual, s) != 0.0F;
  }
  KVMELD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(score, s));
  }

  // What follows is for a block.

  /// Eq. 7: running mean by tokens, w ← w_r + w_c; eq. 8: β = α ln w. False: no slot is residual.
  template <class Scalar, index_t Threads>
  KVMELD_DEVICE bool merge_removed(of_warps<index_t, Threads>& number,
                                   of_warps<candidate, Threads>& best,
                                   const cache_view<Scalar>& cache, const state_view& state,
                                   const head_context& head, index_t h, index_t n, index_t removed,
                                   bool aligned) const {
    index_t residuals = 0;
    KVMELD_ROLLED
    for (index_t s = thread_index(); s < n; s += Threads) {
      residuals += counted(head, s) ? 1 : 0;
    }
    const index_t few = residual - block_sum(number, residuals);
    name_residuals(best, head, n, few, removed);  // only where none was named before
    const index_t into = nearest_residual(best, cache, head, h, n, removed);
    if (into < 0) {
      return false;
    }
    const float ours = head.column(count, into);
    const float theirs = head.column(count, removed), w = ours + theirs;
    const detail::two_weights mean{ours / w, theirs / w};
    const detail::joining how{mean, mean, alpha * logarithm(w)};
    if constexpr (narrow_rows<Scalar>) {
      merge_narrow(cache, h, n, into, removed, mean, means(cache, head, aligned));
      detail::merge_numbers(cache, state, head, h, into, removed, how);
      sync_block();
    } else {
      detail::merge_slot<Threads>(cache, state, head, h, into, removed, how);
    }
    return true;
  }
  /// Of narrow rows the running means in float.
  template <class Scalar>
  KVMELD_DEVICE detail::float_rows<Scalar> means(const cache_view<Scalar>& cache,
                                                 const head_context& head, bool aligned) const {
    return {head.memory, residual, cache.dim, aligned};
  }

  /// Names the residual slots: whatever is merged; then, while context overflows and a residual
  /// slot is free, the context's lowest (Algorithm 1, line 8).
  template <index_t Threads>
  KVMELD_DEVICE void after_compress(of_warps<index_t, Threads>& number,
                                    of_warps<candidate, Threads>& best, const head_context& head,
                                    index_t n) const {
    const protection in_ring{0, ring, head.newest};
    index_t residuals = 0, others = 0;
    KVMELD_ROLLED
    for (index_t s = thread_index(); s < n; s += Threads) {
      float& flag = head.column(is_residual, s);
      const bool is = flag != 0.0F || head.column(count, s) > 1;
      if (is && flag == 0.0F) {
        flag = 1.0F;
      }
      residuals += is ? 1 : 0;
      others += is || in_ring(head.position[s]) ? 0 : 1;
    }
    const index_t few = residual - block_sum(number, residuals);
    const index_t overflow = block_sum(number, others) - context;
    name_residuals(best, head, n, few < overflow ? few : overflow, -1);
  }

 private:
  /// Two rows into one, of which the mean is kept; a warp has its key, another its value.
  template <class Scalar>
  KVMELD_DEVICE static void merge_narrow(const cache_view<Scalar>& cache, index_t h, index_t n,
                                         index_t into, index_t removed,
                                         const detail::two_weights& w,
                                         const detail::float_rows<Scalar>& means) {
    using rows = detail::float_rows<Scalar>;
    typename rows::row own;
    if (warp() < 2) {
      own = means.of(cache, h, n, into);
    }
    sync_block();  // both warps have found it
    if (warp() < 2) {
      const auto x = warp() == 0 ? cache.keys.of(h) : cache.values.of(h);
      typename rows::numbers sum;
      means.take(own, warp(), x.at(into), sum);
      const auto away = load_row(x.at(removed), lane() * rows::width, cache.dim, means.aligned);
      unrolled<rows::width>(
          [&](index_t j) { sum[j] = multiply_add(w.removed, to_float(away[j]), w.kept * sum[j]); });
      means.put(own, warp(), x.at(into), sum);
      if (thread_index() == 0) {
        means.name(own, cache.position_of(h)[into]);
      }
    }
  }

  /// Makes the `some` lowest slots of the context residual ones, `but` one.
  template <index_t Threads>
  KVMELD_DEVICE void name_residuals(of_warps<candidate, Threads>& shared, const head_context& head,
                                    index_t n, index_t some, index_t but) const {
    KVMELD_ROLLED
    for (index_t i = 0; i < some; ++i) {
      candidate best = 0;
      KVMELD_ROLLED
      for (index_t s = thread_index(); s < n; s += Threads) {
        if (s != but && !is_protected(head, s)) {
          const candidate c = least_candidate(order(head, s), s);
          best = c > best ? c : best;
        }
      }
      best = block_max(shared, best);
      if (best != 0 && thread_index() == 0) {
        head.column(is_residual, least_slot(best)) = 1.0F;
      }
      sync_block();
    }
  }

  /// Eq. 6: the residual slot with the largest dot product; ties to the lower.
  template <class Scalar, index_t Threads>
  KVMELD_DEVICE index_t nearest_residual(of_warps<candidate, Threads>& shared,
                                         const cache_view<Scalar>& cache, const head_context& head,
                                         index_t h, index_t n, index_t removed) const {
    const auto keys = cache.keys.of(h);
    const Scalar* const key = keys.at(removed);
    candidate best = 0;
    KVMELD_ROLLED
    for (index_t base = warp() * 32; base < n; base += Threads) {
      const index_t mine = base + lane();
      unsigned flags =
          ballot(mine < n && mine != removed && head.column(is_residual, mine) != 0.0F);
      for (; flags != 0; flags &= flags - 1U) {
        const index_t s = base + lowest_lane(flags);
        const Scalar* const other = keys.at(s);
        float dot = 0;
        for (index_t i = lane(); i < cache.dim; i += 32) {
          dot += load_number(other, i, cache.dim) * load_number(key, i, cache.dim);
        }
        const candidate c = most_candidate(ordered(reduce_sum(dot)), s);
        best = c > best ? c : best;
      }
    }
    return most_slot(block_max(shared, best));
  }
};

}  // namespace kvmeld::cuda
