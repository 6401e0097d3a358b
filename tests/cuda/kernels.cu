// Every kernel for every scalar: what nvcc compiles for the hardware on every commit.
#include "kvfold/cuda/apply.cuh"
#include "kvfold/cuda/column_scores.cuh"
#include "kvfold/cuda/select.cuh"
#include "kvfold/cuda/step.cuh"

namespace kvfold::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
                   const Scalar* q, Scalar* out, workspace memory, stream stream) {
    apply(plan, cache, state, stream);
    attend(cache, q, out, nullptr, memory, stream);
    select(position_rule{}, cache, state, {}, plan, stream);
    select(sum_rule{}, cache, state, {}, plan, stream);
    select(window_rule{}, cache, state, {}, plan, stream);
    column_scores(cache, query_rows<Scalar>{}, {}, {}, memory, stream);
    attend_observe(position_rule{}, cache, state, q, out, nullptr, memory, stream);
    attend_observe(sum_rule{}, cache, state, q, out, nullptr, memory, stream);
    attend_observe(window_rule{}, cache, state, q, out, nullptr, memory, stream);
    attend_observe(residual_rule{}, cache, state, q, out, nullptr, memory, stream);
  }
};

template struct every_kernel<float>;
template struct every_kernel<half>;
template struct every_kernel<bfloat16>;

}  // namespace kvfold::cuda
