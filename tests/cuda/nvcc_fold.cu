// SPDX-License-Identifier: MIT
// fold's plans for each scalar, as nvcc compiles them for the hardware.
#include "kvmeld/cuda/policies/fold.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<row_number<Scalar>>& queries,
                   const detail::fold_plan_memory& work, stream stream) {
    device_policy<fold>::observe({}, fold_rule{}, cache, state, queries, {}, stream);
    device_policy<fold>::plan(fold_rule{}, cache, state, {}, work, stream);
    device_policy<fold>::plan_prompt({}, fold_rule{}, cache, state, queries, {}, work, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;
template struct every_kernel<q8_0<KVMELD_SCALAR>>;  // kernels of its own: one that widens rows

}  // namespace kvmeld::cuda
