// SPDX-License-Identifier: MIT
// Selecting, applying and saving for each scalar, as nvcc compiles them for the hardware.
#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/search/select.cuh"
#include "kvmeld/cuda/state.cuh"
#include "kvmeld/cuda/view.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
                   stream stream) {
    apply(plan, cache, state, stream);
    free_pages(cache, 0, nullptr, nullptr, nullptr, stream);
    save_to_pages(cache, state, {}, nullptr, stream);
    load_from_pages(cache, state, {}, nullptr, stream);
    select(position_rule{}, cache, state, {}, plan, stream);
    select(sum_rule{}, cache, state, {}, plan, stream);
    select(window_rule{}, cache, state, {}, plan, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;

}  // namespace kvmeld::cuda
