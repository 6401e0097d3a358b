// SPDX-License-Identifier: MIT
// d2o, as the tests call it.
#include "kvmeld/cuda/policies/d2o.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvmeld::cuda {

template struct policy_calls<d2o, float>;
template struct policy_calls<d2o, half>;
template struct policy_calls<d2o, bfloat16>;
template struct policy_calls<d2o, q8_0<float>>;
template struct policy_calls<d2o, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
