// SPDX-License-Identifier: MIT
/// d2o on the device.
#pragma once

#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/policies/d2o.hpp"

namespace kvmeld::cuda {

/// D2O: sums as H2O's; an evicted slot merges into the nearest that stays by cosine, or is lost.
struct d2o_rule : sum_rule {
  static constexpr bool merges = true, always_plans = true;
  enum memory_name : index_t { threshold, has_threshold };
  static constexpr float own_weight = 2.718281828F;  // exp of a key's similarity to itself
  float beta = 0.7F;

  /// Floats of the state's memory, a head.
  static std::size_t memory(index_t, index_t, index_t) { return 2; }
  KVMELD_DEVICE void of_target(index_t target) { sum_rule::of_target(target - sinks); }
  /// eq. 10: the threshold after `m` was measured.
  KVMELD_DEVICE float next_threshold(const head_context& head, float m) const {
    return kvmeld::detail::d2o_threshold(
        beta, m, head.memory[has_threshold] != 0, head.memory[threshold],
        [](float a, float b, float c) { return multiply_add(a, b, c); });
  }
};

namespace detail {

/// D2O, eq. 10: those at or above a threshold that follows the mean of the evicted
/// slots, and is remembered.
struct join_above_mean {
  d2o_rule rule;
  bool fills_gap;  ///< of `make_rows`

  template <class Scalar, index_t Threads>
  KVMELD_DEVICE float threshold(of_warps<double, Threads>& shared, const cache_view<Scalar>& cache,
                                const keep_evict_partition& from, const state_view& state,
                                index_t h) const {
    const head_context head = context_of(cache, state, h, 0);
    const index_t count = from.removed_count[h];
    const double sum = block_total(shared, count, [&](index_t i) {
      return static_cast<double>(from.nearest.similarity[cache.slot(h, i)]);
    });
    const auto m = static_cast<float>(sum / count);
    const float now = rule.next_threshold(head, m);
    sync_block();  // all have read the old one
    if (thread_index() == 0 && m == m) {
      head.memory[d2o_rule::threshold] = now, head.memory[d2o_rule::has_threshold] = 1;
    }
    return now;
  }
};

/// D2O, eqs. 11–12: `(e k_j + Σ exp(u_i) k_i)/Z`; the log-mass stays the anchor's.
struct absorb_weights {
  const float* similarity;  // [heads, capacity]

  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h, const head_context&,
                                merge_source* row, index_t size, float&, const auto& team) const {
    const auto weight = [&](index_t i) {
      return i == 0 ? d2o_rule::own_weight : exponential(similarity[cache.slot(h, row[i].source)]);
    };
    float z = 0;
    for (index_t i = team.index(); i < size; i += team.size) {
      z += weight(i);
    }
    z = team.sum(z);
    for (index_t i = team.index(); i < size; i += team.size) {
      row[i].key_weight = row[i].value_weight = weight(i) / z;
    }
  }
};

}  // namespace detail

template <>
struct device_policy<d2o> : evicting_policy {
  static d2o_rule rule(const d2o& policy, const attention_spec&) {
    expects(!policy.counts, "cuda d2o: expected mass=0, got 1");
    expects(policy.weights == d2o::weighting::paper,
            "cuda d2o: expected the paper's weights, got the code's");
    return {{policy.combine, policy.sinks, policy.recent}, policy.beta};
  }
  /// Six launches.
  template <class Scalar>
  static void plan(const d2o_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const detail::plan_memory& work, stream stream) {
    detail::select_into(work.divided, rule, cache, state, limits, stream);
    detail::match_divided(cosine_similarity{}, cache, work, stream);
    detail::write_rows(
        cache, state, work.divided, work.plan, detail::join_above_mean{rule, limits.has_triggers()},
        detail::absorb_weights{work.divided.similarity}, limits.most_target(), stream);
    apply(work.plan, cache, state, stream);
  }
};

}  // namespace kvmeld::cuda
