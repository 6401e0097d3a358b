// SPDX-License-Identifier: MIT
#include "evaluate/policies.hpp"

namespace evaluate {

any_policy named_policy::measuring() const {
  any_policy measured = policy;
  measured.visit([&](auto& p) {
    if constexpr (requires { p.pins = kvmeld::fold::pin_rule::scores; }) {
      p.pins = is_shared(budgets) ? kvmeld::fold::pin_rule::scores : p.pins;
    }
  });
  return measured;
}

query_source source_of(const any_policy& policy) {
  using planned = kvmeld::prompt_use::planned;
  const planned plans = policy.prompt_use().plans;
  return policy.name() == kvmeld::kvzip::name() ? query_source::replay
         : plans == planned::lookahead          ? query_source::lookahead
         : plans == planned::spread             ? query_source::spread
                                                : query_source::own;
}

std::vector<named_policy> all_policies() {
  std::vector<named_policy> list;
  for (const any_policy& p : any_policy::every()) {
    list.push_back({.name = std::string(p.name()), .policy = p, .queries = source_of(p)});
    if (p.name() == kvmeld::fold::name() || p.name() == kvmeld::kvzip::name()) {
      list.back().budgets = budget_allocation::global;
    }
  }
  list.push_back(
      {.name = "fold+equal", .policy = kvmeld::fold{}, .queries = source_of(kvmeld::fold{})});
  list.push_back({.name = "snapkv+pyramid_kv",
                  .policy = kvmeld::snapkv{},
                  .budgets = budget_allocation::pyramid_kv});
  list.push_back({.name = "snapkv+pyramid_infer",
                  .policy = kvmeld::snapkv{},
                  .budgets = budget_allocation::pyramid_infer});
  list.push_back(
      {.name = "snapkv+ada_kv", .policy = kvmeld::snapkv{}, .budgets = budget_allocation::ada_kv});
  list.push_back({.name = "streaming_llm+duo_attention",
                  .policy = kvmeld::streaming_llm{},
                  .budgets = budget_allocation::duo_attention});
  list.push_back({.name = "d2o+d2o", .policy = kvmeld::d2o{}, .budgets = budget_allocation::d2o});
  return list;
}

void set_table(any_policy& policy, index_t slots) {
  policy.visit([&](auto& p) {
    if constexpr (requires { p.table = slots; }) {
      p.table = p.table > 0 ? p.table : static_cast<index_t>(p.gamma * static_cast<float>(slots));
    }
  });
}

std::vector<any_policy> share_clusters(const any_policy& policy,
                                       const kvmeld::budget_profile& profile, index_t tokens) {
  return policy.visit([&](const auto& one) -> std::vector<any_policy> {
    if constexpr (requires { one.sharing(index_t{}, index_t{}); }) {
      if (one.clusters > 0 && profile.has_errors()) {
        constexpr index_t least = 2;
        std::vector<any_policy> policies;
        for (const index_t clusters :
             profile.by_errors(profile.heads() * one.clusters, least, tokens / 2)) {
          auto of_head = one;
          of_head.clusters = clusters;
          policies.push_back(of_head);
        }
        return policies;
      }
    }
    return {};
  });
}

void set_lookahead(any_policy& policy, const kvmeld::future_positions& ahead) {
  policy.visit([&](auto& p) {
    if constexpr (requires { p.decode.ahead = ahead; }) {
      p.decode.ahead = ahead;
    }
  });
}

}  // namespace evaluate
