// d2o, as the tests call it.
#include "kvfold/cuda/policies/d2o.cuh"

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"

namespace kvfold::cuda {

template struct policy_calls<d2o, float>;
template struct policy_calls<d2o, half>;
template struct policy_calls<d2o, bfloat16>;

}  // namespace kvfold::cuda
