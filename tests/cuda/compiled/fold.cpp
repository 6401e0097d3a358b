// fold, as the tests call it.
#include "kvfold/cuda/policies/fold.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvfold::cuda {

template struct policy_calls<fold, float>;
template struct policy_calls<fold, half>;
template struct policy_calls<fold, bfloat16>;

}  // namespace kvfold::cuda
