/// ZSMerge in a step: what leaves goes into a residual slot.
#pragma once

#include "kvfold/cuda/merge/slot_removals.cuh"
#include "kvfold/cuda/policies/zsmerge/residual.cuh"

namespace kvfold::cuda::detail {

/// eq. 6: the residual slot with the largest dot product; ties to the lower.
template <class Scalar, index_t Threads>
KVFOLD_DEVICE index_t nearest_residual(of_warps<candidate, Threads>& shared,
                                       const cache_view<Scalar>& cache, const head_context& head,
                                       index_t h, index_t n, index_t removed) {
  const auto keys = cache.keys.of(h);
  const Scalar* const key = keys.at(removed);
  candidate best = 0;
  for (index_t base = warp() * 32; base < n; base += Threads) {
    const index_t mine = base + lane();
    unsigned flags =
        ballot(mine < n && mine != removed && head.column(zsmerge_rule::is_residual, mine) != 0.0F);
    for (index_t l = 0; l < 32; ++l) {
      if ((flags >> l & 1U) != 0) {
        const Scalar* const other = keys.at(base + l);
        float dot = 0;
        for (index_t i = lane(); i < cache.dim; i += 32) {
          dot += to_float(other[i]) * to_float(key[i]);
        }
        const candidate c = most_candidate(ordered(reduce_sum(dot)), base + l);
        best = c > best ? c : best;
      }
    }
  }
  return most_slot(block_max(shared, best));
}

/// eq. 7: running mean by tokens, w ← w_r + w_c; eq. 8: β = α ln w. False: nowhere to go.
template <class Scalar, index_t Threads>
KVFOLD_DEVICE bool merge_into_residual(const zsmerge_rule& rule, of_warps<index_t, Threads>& number,
                                       of_warps<candidate, Threads>& best,
                                       const cache_view<Scalar>& cache, const state_view& state,
                                       const head_context& head, index_t h, index_t n,
                                       index_t removed) {
  index_t residuals = 0;
  for (index_t s = thread_index(); s < n; s += Threads) {
    residuals += rule.counted(head, s) ? 1 : 0;
  }
  const index_t missing = rule.residual - block_sum(number, residuals);
  name_residuals(rule, best, head, n, missing, removed);  // only where nothing was settled before
  const index_t into = nearest_residual(best, cache, head, h, n, removed);
  if (into < 0) {
    return false;
  }
  const float ours = head.column(zsmerge_rule::count, into);
  const float theirs = head.column(zsmerge_rule::count, removed), w = ours + theirs;
  const two_weights mean{ours / w, theirs / w};
  merge_slot<Threads>(cache, state, head, h, into, removed,
                      {true, mean, mean, rule.alpha * logarithm(w)});
  return true;
}

}  // namespace kvfold::cuda::detail
