// SPDX-License-Identifier: MIT
// Plans that merge, for each scalar, as nvcc compiles them for the hardware.
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda::detail {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<Scalar>& queries, const plan_memory& work, stream stream) {
    device_policy<zsmerge>::plan(zsmerge_rule{}, cache, state, {}, work, stream);
    device_policy<d2o>::plan(d2o_rule{}, cache, state, {}, work, stream);
    device_policy<kvmerger>::plan(kvmerger_rule{}, cache, state, {}, work, stream);
    device_policy<keepkv>::plan(keepkv_rule{}, cache, state, {}, work, stream);
    merge_first(keepkv_rule{}, cache, state, {}, work, stream);
    estimate(keepkv_rule{}, cache, state, queries, stream);
    const extent one{};
    launch(add_sums<Scalar>{cache, state, queries, nullptr, 1}, one, stream);
    launch(pool_sums<Scalar>{cache, state, {}, 7, false, nullptr, nullptr, nullptr}, one, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;

/// Policies whose plans narrow rows have.
template <class Scalar>
struct narrow_kernels {
  static void call(const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<row_number<Scalar>>& queries, const plan_memory& work,
                   stream stream) {
    device_policy<zsmerge>::plan(zsmerge_rule{}, cache, state, {}, work, stream);
    device_policy<kvmerger>::plan(kvmerger_rule{}, cache, state, {}, work, stream);
    device_policy<d2o>::plan(d2o_rule{}, cache, state, {}, work, stream);
    device_policy<keepkv>::plan(keepkv_rule{}, cache, state, {}, work, stream);
    merge_first(keepkv_rule{}, cache, state, {}, work, stream);
    estimate(keepkv_rule{}, cache, state, queries, stream);
    match_divided(cosine_similarity{}, cache, work, stream);
  }
};

template struct narrow_kernels<q8_0<KVMELD_SCALAR>>;
template struct narrow_kernels<fp8_e4m3<KVMELD_SCALAR>>;

}  // namespace kvmeld::cuda::detail
