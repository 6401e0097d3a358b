// SPDX-License-Identifier: MIT
// zsmerge, as the tests call it.
#include "kvmeld/cuda/policies/zsmerge.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvmeld::cuda {

template struct policy_calls<zsmerge, float>;
template struct policy_calls<zsmerge, half>;
template struct policy_calls<zsmerge, bfloat16>;
template struct policy_calls<zsmerge, q8_0<float>>;
template struct policy_calls<zsmerge, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
