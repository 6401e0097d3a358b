// SPDX-License-Identifier: MIT
// EMS's plans for each scalar, as nvcc compiles them for the hardware.
#include "kvmeld/cuda/policies/ems.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<row_number<Scalar>>& queries,
                   const detail::prompt_memory<ems_rule>& prompt, stream stream) {
    device_policy<ems>::plan(ems_rule{}, cache, state, {}, prompt.plan, stream);
    device_policy<ems>::observe({}, ems_rule{}, cache, state, queries, prompt, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;
template struct every_kernel<q8_0<KVMELD_SCALAR>>;

}  // namespace kvmeld::cuda
