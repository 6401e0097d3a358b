// SPDX-License-Identifier: MIT
// keepkv, as the tests call it.
#include "kvmeld/cuda/policies/keepkv.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvmeld::cuda {

template struct policy_calls<keepkv, float>;
template struct policy_calls<keepkv, half>;
template struct policy_calls<keepkv, bfloat16>;
template struct policy_calls<keepkv, q8_0<float>>;
template struct policy_calls<keepkv, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
