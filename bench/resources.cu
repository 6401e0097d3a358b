// SPDX-License-Identifier: MIT
// The hot kernels for `bench/resources`, compiled as an engine compiles them. Prints what the
// compiler does not report: a kernel's name there, its type, its threads and its shared memory.
#include <cstdio>
#include <typeinfo>

#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/merge/attend_and_observe.cuh"
#include "kvmeld/cuda/merge/drop_rows.cuh"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems/match.cuh"
#include "kvmeld/cuda/policies/ems/scores.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/policies/fold/leverage.cuh"
#include "kvmeld/cuda/policies/fold/pairs.cuh"
#include "kvmeld/cuda/policies/fold/points.cuh"
#include "kvmeld/cuda/policies/fold/space.cuh"
#include "kvmeld/cuda/policies/fold/values.cuh"
#include "kvmeld/cuda/policies/keepkv/join_leaders.cuh"
#include "kvmeld/cuda/policies/keepkv/rule.cuh"
#include "kvmeld/cuda/policies/kvmerger/name_runs.cuh"
#include "kvmeld/cuda/policies/kvmerger/neighbours.cuh"
#include "kvmeld/cuda/policies/kvmerger/weights.cuh"
#include "kvmeld/cuda/policies/zsmerge/residual.cuh"
#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/search/clusters.cuh"
#include "kvmeld/cuda/search/select.cuh"

namespace kvmeld::cuda::detail {
namespace {

/// Is there code of it?
template <class Kernel>
bool print(const char* name) {
  std::printf("%s %s %d %zu\n", name, typeid(Kernel).name(), static_cast<int>(Kernel::threads),
              sizeof(typename Kernel::shared_memory));
  return reinterpret_cast<const void*>(&run<Kernel>) != nullptr;
}

template <class Rule, class Then>
using select_then = one_after_other<select_slots<half, Rule, keep_evict_partition>, Then>;
template <class First>
using then_rows = one_after_other<First, make_rows<half, join_all>>;
template <class Rule, class Masses = log_masses, index_t Depth = 128>
using whole_heads = attend_whole_heads<attend_tiles<half, Depth, 1, Masses>,
                                       observe_and_remove<half, Rule, 128, 1>>;
template <measured What>
using columns_of = stream_columns<half, 128, What, query_rows<half>>;

bool print_all() {
  return print<attend_tiles<half, 128, 1, log_masses>>("attend") &&
         print<attend_tiles<half, 128, 2, log_masses>>("attend-group-16") &&
         print<attend_tiles<half, 256, 1, log_masses>>("attend-dim-256") &&
         print<attend_tiles<half, 128, 1, entry_masses>>("attend-entries") &&
         print<attend_rows<float, 1, 4, log_masses>>("attend-float") &&
         print<attend_latent_rows<half>>("attend-latent") &&
         print<attend_rows<q8_0<half>, 1, 2, log_masses>>("attend-q8") &&
         print<attend_rows<fp8_e4m3<half>, 1, 2, log_masses>>("attend-fp8") &&
         print<merge_blocks<q8_0<half>>>("apply-q8-merges") &&
         print<observe_and_remove<half, sum_rule>>("observe-h2o") &&
         print<observe_and_remove<half, window_rule>>("observe-snapkv") &&
         print<observe_and_remove<half, zsmerge_rule>>("observe-zsmerge") &&
         print<observe_and_remove<half, d2o_rule>>("observe-d2o") &&
         print<observe_and_remove<half, keepkv_rule>>("observe-keepkv") &&
         print<observe_and_remove<half, ems_rule>>("observe-ems") &&
         print<whole_heads<position_rule>>("whole-streaming") &&
         print<whole_heads<sum_rule>>("whole-h2o") &&
         print<whole_heads<window_rule>>("whole-snapkv") &&
         print<whole_heads<zsmerge_rule>>("whole-zsmerge") &&
         print<whole_heads<d2o_rule>>("whole-d2o") &&
         print<whole_heads<keepkv_rule>>("whole-keepkv") &&
         print<whole_heads<ems_rule, entry_masses>>("whole-ems") &&
         print<whole_heads<ems_rule, entry_masses, 64>>("whole-ems-64") &&
         print<whole_heads<fold_rule>>("whole-fold") &&
         print<columns_of<measured::log_sums>>("log-sums") &&
         print<columns_of<measured::one_sum>>("column-sums") &&
         print<columns_of<measured::three_sums>>("column-three-sums") &&
         print<columns_of<measured::largest>>("column-largest") &&
         print<apply_rows<half, 4>>("apply") && print<apply_rows<bfloat16, 4>>("apply-bfloat16") &&
         print<apply_rows<half, 16>>("apply-wide") &&
         print<apply_rows<bfloat16, 16>>("apply-wide-bf16") &&
         print<apply_rows<float, 16>>("apply-wide-float") &&
         print<nearest_kept<half, 128, cosine_similarity>>("match") &&
         print<nearest_kept<half, 256, cosine_similarity>>("match-256") &&
         print<nearest_kept<half, 128, ward_similarity>>("match-ward") &&
         print<nearest_kept<float, 128, cosine_similarity>>("match-float") &&
         print<nearest_kept<q8_0<half>, 128, cosine_similarity>>("match-q8") &&
         print<nearest_kept<fp8_e4m3<half>, 128, cosine_similarity>>("match-fp8") &&
         print<join_leaders<half, 128>>("keepkv-leaders") &&
         print<join_leaders<half, 256>>("keepkv-leaders-256") &&
         print<redundant_tiles<half, 128>>("ems-centres") &&
         print<redundant_tiles<half, 256>>("ems-centres-256") &&
         print<one_after_other<weigh_entries<half>, divide_entries<half>>>("ems-divides") &&
         print<select_slots<half, sum_rule, evictions>>("select") &&
         print<select_slots<half, d2o_rule, keep_evict_partition>>("select-d2o") &&
         print<select_slots<half, keepkv_rule, keep_evict_partition>>("select-keepkv") &&
         print<select_then<zsmerge_rule, place_residuals<half>>>("zsmerge-select") &&
         print<select_then<kvmerger_rule, order_by_position<half>>>("kvmerger-select") &&
         print<pair_cosines<half>>("kvmerger-pairs") &&
         print<then_rows<name_runs<half>>>("kvmerger-runs") &&
         print<then_rows<drop_rows<half, marked_rows>>>("kvmerger-drops") &&
         print<weigh_rows<half, gaussian_weights>>("kvmerger-weights") &&
         print<weigh_rows<half, residual_weights>>("zsmerge-weights") &&
         print<make_rows<half, join_above_mean>>("d2o-rows") &&
         print<weigh_rows<half, absorb_weights>>("d2o-weights") &&
         print<sum_moments<unrotated_keys<half>, 64>>("fold-moments-64") &&
         print<sum_moments<unrotated_keys<half>, 128>>("fold-moments") &&
         print<sum_moments<unrotated_keys<half>, 256>>("fold-moments-256") &&
         print<sum_moments<reference_rows<half>, 128>>("fold-metric") &&
         print<make_covariance<unrotated_keys<half>>>("fold-covariance") &&
         print<invert_covariance<half, 128>>("fold-inverse") &&
         print<factor_space<half, 128>>("fold-space") &&
         print<measure_leverage<half, 64>>("fold-leverage-64") &&
         print<measure_leverage<half, 128>>("fold-leverage") &&
         print<measure_leverage<half, 256>>("fold-leverage-256") &&
         print<choose_cheapest<half>>("fold-cheapest") && print<pick_seeds<>>("fold-seeds") &&
         print<pick_seeds<pick_seeds<>::few>>("fold-seeds-small") &&
         print<nearest_centre<256>>("fold-nearest") &&
         print<nearest_centre<512>>("fold-nearest-256") &&
         print<nearest_centre<512, 64>>("fold-near-256-sm") && print<mean_centres>("fold-means") &&
         print<make_points<half, 128>>("fold-points") &&
         print<make_points<half, 256>>("fold-points-256") &&
         print<reference_tiles<half, 128>>("fold-outputs") &&
         print<reference_tiles<half, 256>>("fold-outputs-256") &&
         print<row_masses<half, 128>>("fold-masses") &&
         print<row_masses<half, 256>>("fold-masses-256") &&
         print<probability_tiles<half, 128>>("fold-probabilities") &&
         print<probability_tiles<half, 256>>("fold-probab-256") &&
         print<multiply_rows<1, false>>("ridge-products") &&
         print<multiply_rows<2, false>>("ridge-float") &&
         print<multiply_rows<1, true>>("ridge-dual") && print<update_column>("ridge-update") &&
         print<solve_column>("ridge-solve") && print<substitute_back>("ridge-back") &&
         print<multiply_solution<1>>("ridge-dual-back");
}

}  // namespace
}  // namespace kvmeld::cuda::detail

int main() { return kvmeld::cuda::detail::print_all() ? 0 : 1; }
