// SPDX-License-Identifier: MIT
// ems, as the tests call it.
#include "kvmeld/cuda/policies/ems.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvmeld::cuda {

template struct policy_calls<ems, float>;
template struct policy_calls<ems, half>;
template struct policy_calls<ems, bfloat16>;
template struct policy_calls<ems, q8_0<float>>;
template struct policy_calls<ems, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
