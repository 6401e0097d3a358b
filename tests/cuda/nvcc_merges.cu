// Steps and plans that merge, for each scalar, as nvcc compiles them for the hardware on every
// commit.
#include "kvfold/cuda/compress.cuh"

namespace kvfold::cuda::detail {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<Scalar>& queries, const plan_memory& work,
                   const partial_attention& partial, stream stream) {
    plan_and_apply(residual_rule{}, cache, state, {}, work, stream);
    plan_and_apply(absorb_rule{}, cache, state, {}, work, stream);
    plan_and_apply(run_rule{}, cache, state, {}, work, stream);
    plan_and_apply(vote_rule{}, cache, state, {}, work, stream);
    merge_first(vote_rule{}, cache, state, 1, work, stream);
    estimate<Scalar, 128>(vote_rule{}, cache, state, queries, stream);
    estimate<Scalar, 256>(vote_rule{}, cache, state, queries, stream);
    const extent one{};
    launch(leave_for_nearest<Scalar, absorb_rule>{cache, state, partial, {}, true}, one, stream);
    launch(leave_for_nearest<Scalar, vote_rule>{cache, state, partial, {}, true}, one, stream);
    launch(add_sums<Scalar>{cache, state, nullptr, 1}, one, stream);
    launch(pool_sums<Scalar>{cache, state, {}, 7, false, nullptr, nullptr, nullptr}, one, stream);
  }
};

template struct every_kernel<KVFOLD_SCALAR>;

}  // namespace kvfold::cuda::detail
