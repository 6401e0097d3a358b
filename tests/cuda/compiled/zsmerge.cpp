// zsmerge, as the tests call it.
#include "kvfold/cuda/policies/zsmerge.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvfold::cuda {

template struct policy_calls<zsmerge, float>;
template struct policy_calls<zsmerge, half>;
template struct policy_calls<zsmerge, bfloat16>;

}  // namespace kvfold::cuda
