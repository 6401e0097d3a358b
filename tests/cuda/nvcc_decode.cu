// SPDX-License-Identifier: MIT
// Attention, observing and removals for each scalar, as nvcc compiles them for the hardware on
// every commit.
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/policies/zsmerge/rule.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const state_view& state, const Scalar* q,
                   Scalar* out, workspace memory, stream stream) {
    attend(cache, q, out, nullptr, memory, stream);
    attend_observe(position_rule{}, cache, state, q, out, nullptr, memory, stream);
    attend_observe(sum_rule{}, cache, state, q, out, nullptr, memory, stream);
    attend_observe(window_rule{}, cache, state, q, out, nullptr, memory, stream);
    attend_observe(zsmerge_rule{}, cache, state, q, out, nullptr, memory, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;

}  // namespace kvmeld::cuda
