// SPDX-License-Identifier: MIT
// fold, as the tests call it.
#include "kvmeld/cuda/policies/fold.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvmeld::cuda {

template struct policy_calls<fold, float>;
template struct policy_calls<fold, half>;
template struct policy_calls<fold, bfloat16>;
template struct policy_calls<fold, q8_0<float>>;
template struct policy_calls<fold, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
