// Selecting and applying for each scalar, as nvcc compiles them for the hardware on every commit.
#include "kvfold/cuda/merge/apply.cuh"
#include "kvfold/cuda/policies/evicting_rules.cuh"
#include "kvfold/cuda/search/select.cuh"

namespace kvfold::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
                   stream stream) {
    apply(plan, cache, state, stream);
    select(position_rule{}, cache, state, {}, plan, stream);
    select(sum_rule{}, cache, state, {}, plan, stream);
    select(window_rule{}, cache, state, {}, plan, stream);
  }
};

template struct every_kernel<KVFOLD_SCALAR>;

}  // namespace kvfold::cuda
