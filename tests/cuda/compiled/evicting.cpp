// SPDX-License-Identifier: MIT
// Policies that evict, as the tests call them.
#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"

namespace kvmeld::cuda {

template struct policy_calls<streaming_llm, float>;
template struct policy_calls<streaming_llm, half>;
template struct policy_calls<streaming_llm, bfloat16>;
template struct policy_calls<h2o, float>;
template struct policy_calls<h2o, half>;
template struct policy_calls<h2o, bfloat16>;
template struct policy_calls<tova, float>;
template struct policy_calls<tova, half>;
template struct policy_calls<tova, bfloat16>;
template struct policy_calls<snapkv, float>;
template struct policy_calls<snapkv, half>;
template struct policy_calls<snapkv, bfloat16>;
template struct policy_calls<streaming_llm, q8_0<float>>;
template struct policy_calls<h2o, q8_0<float>>;
template struct policy_calls<snapkv, q8_0<float>>;
template struct policy_calls<h2o, fp8_e4m3<float>>;

}  // namespace kvmeld::cuda
