/// What the kernels know of a policy: how a slot's attention enters its score, which slots never
/// leave, and which leaves first. A rule is numbers; the policy's budget is already in them.
#pragma once

#include <string_view>

#include "kvfold/budget.hpp"
#include "kvfold/cuda/policies/d2o/rule.cuh"
#include "kvfold/cuda/policies/ems/rule.cuh"
#include "kvfold/cuda/policies/evicting_rules.cuh"
#include "kvfold/cuda/policies/fold/rule.cuh"
#include "kvfold/cuda/policies/keepkv/rule.cuh"
#include "kvfold/cuda/policies/kvmerger/rule.cuh"
#include "kvfold/cuda/policies/zsmerge/rule.cuh"

namespace kvfold::cuda {

namespace detail {
template <class>
inline constexpr bool no_cuda_path = false;
}  // namespace detail

/// The rule of `policy` under `budget`, for rows of `dim`. A policy is known by its name and its
/// members; what has no CUDA path is refused when compiled, a mode that has none when called.
template <class Policy>
auto rule_of(const Policy& policy, const budget& budget, [[maybe_unused]] index_t dim = 0) {
  constexpr std::string_view name = Policy::name();
  if constexpr (name == "full_cache") {
    return no_rule{};
  } else if constexpr (name == "streaming_llm") {
    expects(policy.positions == decltype(policy.positions)::original,
            "cuda streaming_llm: original positions expected, cache_index came");
    return position_rule{{}, policy.sinks};
  } else if constexpr (name == "h2o") {
    return sum_rule{policy.combine, policy.sinks, share_of(policy.recent, budget.target)};
  } else if constexpr (name == "tova") {
    return sum_rule{policy.combine, policy.sinks, 0, 0.0F};
  } else if constexpr (name == "snapkv") {
    return window_rule{policy.combine, policy.sinks, policy.window};
  } else if constexpr (name == "zsmerge") {
    const index_t share = share_of(policy.proximity, budget.target), ring = share < 2 ? 2 : share;
    return zsmerge_rule{policy.combine,
                        policy.sinks,
                        ring,
                        policy.residual,
                        budget.target - ring - policy.residual,
                        policy.decay,
                        policy.alpha,
                        policy.newcomer_competes,
                        policy.prompt == decltype(policy.prompt)::chunked};
  } else if constexpr (name == "d2o") {
    return d2o_rule{
        {policy.combine, policy.sinks, share_of(policy.recent, budget.target - policy.sinks)},
        policy.beta};
  } else if constexpr (name == "kvmerger") {
    const index_t share = share_of(policy.heavy, budget.target);
    return kvmerger_rule{{policy.combine, policy.sinks, share_of(policy.recent, budget.target)},
                         share > policy.sinks ? share : policy.sinks,
                         policy.joins == decltype(policy.joins)::threshold,
                         policy.epsilon,
                         policy.sigma,
                         policy.scale_values,
                         policy.gaps_break};
  } else if constexpr (name == "ems") {
    return ems_rule{policy.combine,
                    policy.sinks,
                    policy.window,
                    policy.kernel,
                    policy.gamma,
                    policy.threshold,
                    policy.with_position,
                    policy.table,
                    policy.with_position ? rope_params{} : rope_params_of(policy.rope, dim)};
  } else if constexpr (name == "keepkv") {
    expects(policy.as == decltype(policy.as)::paper,
            "cuda keepkv: the paper's mode expected, the code's came");
    return keepkv_rule{group_combine::sum, policy.sinks, share_of(policy.recent, budget.target),
                       policy.similarity, policy.decay};
  } else if constexpr (name == "fold") {
    const auto& decode = policy.decode;
    const auto& p = policy.prompt;
    return fold_rule{group_combine::sum,
                     policy.sinks,
                     policy.recent,
                     policy.recent_share,
                     policy.share,
                     decode.queries,
                     decode.stride,
                     decode.period,
                     decode.ahead.horizon,
                     double{decode.ahead.fade},
                     {p.pool, p.leverage_ridge, p.outlier, p.rounds, p.floor, p.ridge},
                     rope_params_of(policy.rope, dim)};
  } else {
    static_assert(detail::no_cuda_path<Policy>, "kvfold::cuda: this policy has no CUDA path yet");
  }
}

namespace detail {

/// Refuses a state without the memory that `policy` keeps of a head.
template <class Policy, class Scalar>
void expect_memory(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state) {
  if constexpr (requires { policy.memory(cache.dim, cache.group, cache.capacity); }) {
    const std::size_t floats = policy.memory(cache.dim, cache.group, cache.capacity);
    expects(state.floats >= 0 && static_cast<std::size_t>(state.floats) >= floats, "cuda ",
            Policy::name(), ": a state of ", floats, " floats of memory a head expected, ",
            state.floats, " came");
  }
}

}  // namespace detail

}  // namespace kvfold::cuda
