// SPDX-License-Identifier: MIT
// fold's steps and plans for each scalar, as nvcc compiles them for the hardware on every commit.
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/policies/fold.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const state_view& state, const Scalar* q,
                   const query_rows<Scalar>& queries, Scalar* out,
                   const detail::fold_plan_memory& work, workspace memory, stream stream) {
    attend_observe(fold_rule{}, cache, state, q, out, nullptr, memory, stream);
    device_policy<fold>::observe({}, fold_rule{}, cache, state, queries, {}, stream);
    device_policy<fold>::plan(fold_rule{}, cache, state, {}, work, stream);
    detail::fold_clusters(fold_rule{}, cache, state, queries, {}, work, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;

}  // namespace kvmeld::cuda
