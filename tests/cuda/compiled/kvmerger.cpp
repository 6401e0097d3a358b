// SPDX-License-Identifier: MIT
// kvmerger, as the tests call it.
#include "kvmeld/cuda/policies/kvmerger.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvmeld::cuda {

template struct policy_calls<kvmerger, float>;
template struct policy_calls<kvmerger, half>;
template struct policy_calls<kvmerger, bfloat16>;
template struct policy_calls<kvmerger, q8_0<float>>;
template struct policy_calls<kvmerger, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
