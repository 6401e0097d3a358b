// Every kernel for every scalar: what nvcc compiles for the hardware on every commit.
#include "kvfold/cuda/apply.cuh"

namespace kvfold::cuda {

template void apply(const plan_view&, const cache_view<float>&, const state_view&, stream);
template void apply(const plan_view&, const cache_view<half>&, const state_view&, stream);
template void apply(const plan_view&, const cache_view<bfloat16>&, const state_view&, stream);

}  // namespace kvfold::cuda
