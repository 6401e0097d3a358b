#include "evaluate/policies.hpp"

namespace evaluate {

std::vector<named_policy> all_policies() {
  std::vector<named_policy> list;
  for (const any_policy& p : any_policy::every()) {
    list.push_back({std::string(p.name()), p});
    if (p.name() == kvfold::fold::name()) {
      list.back().queries = query_source::foresight;
    } else if (p.name() == kvfold::attention_matching::name()) {
      list.back().queries = query_source::spread;
    }
  }
  list.push_back({.name = "snapkv+pyramid_kv",
                  .policy = kvfold::snapkv{},
                  .budgets = budget_allocation::pyramid_kv});
  list.push_back({.name = "snapkv+pyramid_infer",
                  .policy = kvfold::snapkv{},
                  .budgets = budget_allocation::pyramid_infer});
  list.push_back(
      {.name = "snapkv+ada_kv", .policy = kvfold::snapkv{}, .budgets = budget_allocation::ada_kv});
  list.push_back({.name = "streaming_llm+duo_attention",
                  .policy = kvfold::streaming_llm{},
                  .budgets = budget_allocation::duo_attention});
  list.push_back({.name = "d2o+d2o", .policy = kvfold::d2o{}, .budgets = budget_allocation::d2o});
  return list;
}

void set_rope(any_policy& policy, const kvfold::rope& rope) {
  policy.visit([&](auto& p) {
    if constexpr (requires { p.rope = rope; }) {
      p.rope = rope;
    }
  });
}

void set_table(any_policy& policy, index_t slots) {
  policy.visit([&](auto& p) {
    if constexpr (requires { p.table = slots; }) {
      p.table = p.table > 0 ? p.table : static_cast<index_t>(p.gamma * static_cast<float>(slots));
    }
  });
}

void set_lookahead(any_policy& policy, const kvfold::future_positions& ahead) {
  policy.visit([&](auto& p) {
    if constexpr (requires { p.decode.ahead = ahead; }) {
      p.decode.ahead = ahead;
    }
  });
}

}  // namespace evaluate

namespace kvfold {

template void observe(const evaluate::any_policy&, const head_view<float>&, head_state&, workspace&,
                      observation);
template void observe(const evaluate::any_policy&, const head_view<float>&, head_state&,
                      const query_view<float>&);
template void plan(const evaluate::any_policy&, const head_view<float>&, const head_state&,
                   const query_view<float>&, index_t, merge_plan&);
template void compress(const evaluate::any_policy&, const head_view<float>&, head_state&,
                       workspace&, const budget&, const query_view<float>&);
template void step(const evaluate::any_policy&, const head_view<float>&, head_state&, workspace&,
                   const float*, const float*, const float*, const budget&, float*);
template head_state make_head_state(const evaluate::any_policy&, const head_view<float>&);
template void check(const evaluate::any_policy&, const budget&, index_t);

// Over all heads of a cache: a policy for all of them, or one for each.
template state make_state(const evaluate::any_policy&, cache<float>&, const serial&);
template void compress(const evaluate::any_policy&, cache<float>&, state&, const query_view<float>&,
                       const std::span<const budget>&, const serial&);
template void step(const std::span<const evaluate::any_policy>&, cache<float>&, state&,
                   const step_input&, const std::span<const budget>&, std::span<float>,
                   const serial&);

}  // namespace kvfold
