// SPDX-License-Identifier: MIT
// A step's attention, observing and removals for each scalar and rule, optimised as an engine
// compiles them for the hardware: `lost_registers` reads what the assembler has made of them.
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/merge/observe_attended.cuh"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  template <class... Rules>
  static void call(const cache_view<Scalar>& cache, const state_view& state, const Scalar* q,
                   Scalar* out, workspace memory, stream stream) {
    attend(cache, q, out, nullptr, memory, stream);
    if constexpr (sizeof(Scalar) == 2) {
      attend_latent(cache, 576, q, out, nullptr, memory, stream);
    }
    (attend_observe(Rules{}, cache, state, q, out, nullptr, memory, stream), ...);
    detail::observe_attended(sum_rule{}, cache, state, {}, {}, {}, stream);
  }
};

template void every_kernel<KVMELD_SCALAR>::call<position_rule, sum_rule, window_rule, kvmerger_rule,
                                                zsmerge_rule, d2o_rule, keepkv_rule, ems_rule,
                                                fold_rule>(const cache_view<KVMELD_SCALAR>&,
                                                           const state_view&, const KVMELD_SCALAR*,
                                                           KVMELD_SCALAR*, workspace, stream);
template void attend_observe(const sum_rule&, const cache_view<q8_0<KVMELD_SCALAR>>&,
                             const state_view&, const KVMELD_SCALAR*, KVMELD_SCALAR*, float*,
                             workspace, stream);
template void attend_observe(const zsmerge_rule&, const cache_view<q8_0<KVMELD_SCALAR>>&,
                             const state_view&, const KVMELD_SCALAR*, KVMELD_SCALAR*, float*,
                             workspace, stream);
template void attend_observe(const zsmerge_rule&, const cache_view<fp8_e4m3<KVMELD_SCALAR>>&,
                             const state_view&, const KVMELD_SCALAR*, KVMELD_SCALAR*, float*,
                             workspace, stream);

}  // namespace kvmeld::cuda
