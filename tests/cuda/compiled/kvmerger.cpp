// kvmerger, as the tests call it.
#include "kvfold/cuda/policies/kvmerger.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvfold::cuda {

template struct policy_calls<kvmerger, float>;
template struct policy_calls<kvmerger, half>;
template struct policy_calls<kvmerger, bfloat16>;

}  // namespace kvfold::cuda
