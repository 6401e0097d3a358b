// SPDX-License-Identifier: MIT
// fold by scores from an empty cache: against its oracle, and what it keeps.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/peers.hpp"
#include "oracle/oracle.hpp"
#include "support/fixtures.hpp"
#include "support/terms.hpp"

namespace fold_streams_test {

using fixtures::index_t;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::fold;

TEST_CASE("fold by scores in a stream is its oracle: what stands out has all but the clusters",
          "[oracle]") {
  const index_t of_group = GENERATE(1, 3), width = GENERATE(7, 16), more = GENERATE(0, 3, 37);
  const bool shared = GENERATE(false, true);
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::merged_terms));
  INFO(terms.name << ", dim " << width << ", group " << of_group);
  fold policy = shared ? fold{}.sharing(40) : fold{.pins = fold::pin_rule::scores};
  policy.decode.period = 4, policy.decode.stride = 1;
  const index_t slots = shared ? policy.slots_beside_pins() + more : 40;
  const oracle::fold o{.sinks = 4,
                       .recent = policy.prompt_recent,
                       .leverage_ridge = 1,
                       .by_scores = true,
                       .clusters = policy.clusters,
                       .period = 4,
                       .stride = 1,
                       .decode_recent = 10};
  fixtures::cache<float> kv{
      terms.shape(1, of_group, width, slots + 1, fixtures::default_rope, width + 3)};
  auto state = fixtures::make_state(any_policy(policy), kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  const budget most = kvmeld::budget_within(any_policy(policy), slots);
  std::vector<float> out(static_cast<std::size_t>(of_group * (width + 3)));
  for (index_t t = 0; t < 2 * slots; ++t) {
    const auto q = fixtures::normal(of_group * width), k = fixtures::normal(width),
               v = fixtures::normal(width + 3);
    fixtures::step(any_policy(policy), kv, state, {q, k, v}, most, out);
    o.step(expected, fixtures::to_mat(q.data(), of_group, width),
           fixtures::to_mat(k.data(), 1, width)[0], fixtures::to_mat(v.data(), 1, width + 3)[0],
           most.slots, most.trigger);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-3);
  }
}

TEST_CASE("fold that scores what it decodes is its oracle, from an empty cache and after a prompt",
          "[oracle]") {
  const index_t of_group = GENERATE(1, 3), width = GENERATE(7, 16), more = GENERATE(0, 37),
                rescore = GENERATE(1, 5, 16), period = GENERATE(0, 4), prompt = GENERATE(0, 90);
  const bool shared = GENERATE(false, true);
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::merged_terms));
  INFO(terms.name << ", dim " << width << ", group " << of_group);
  fold policy = shared ? fold{}.sharing(40) : fold{.pins = fold::pin_rule::scores};
  policy.decode.period = period, policy.decode.rescore = rescore;
  const index_t slots = shared ? policy.slots_beside_pins() + more : 40;
  const oracle::fold o{.sinks = 4,
                       .recent = policy.prompt_recent,
                       .outliers = 0.5,
                       .pool = 5,
                       .leverage_ridge = 1,
                       .outlying = 1.6,
                       .by_scores = true,
                       .clusters = policy.clusters,
                       .mean_slots = policy.mean,
                       .period = period,
                       .decode_recent = 10,
                       .rescore = rescore};
  fixtures::cache<float> kv{terms.shape(1, of_group, width, std::max(slots, prompt) + 1,
                                        fixtures::default_rope, width + 3)};
  const any_policy any = policy;
  auto state = fixtures::make_state(any, kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  const budget most = kvmeld::budget_within(any, slots);
  if (slots - kvmeld::declared(any).min_budget() > std::max(rescore, 4)) {
    CHECK(most.trigger - most.slots == (period > 0 ? period : std::max(rescore, slots / 16)));
  }
  std::vector<float> out(static_cast<std::size_t>(of_group * (width + 3)));
  if (prompt > 0) {
    const auto k = fixtures::normal(prompt * width), v = fixtures::normal(prompt * (width + 3));
    kv.append(0, k, v);
    const oracle::mat keys = fixtures::to_mat(k.data(), prompt, width),
                      values = fixtures::to_mat(v.data(), prompt, width + 3);
    for (std::size_t t = 0; t < keys.size(); ++t) {
      append(expected, keys[t], values[t], static_cast<int>(t));
    }
    const fixtures::queries queries(prompt, of_group, width);
    fixtures::observe(any, kv, state, queries.view());
    const auto reference = evaluate::lookahead(kv, queries.view());
    // Not by the fixture, which has the reference queries remembered.
    kvmeld::compress(any, kv.head(0), state[0], state.workspace(), budget{most.slots},
                     reference.view());
    o.score(expected, queries.tensor());
    o.prompt(expected, queries.tensor(), {}, most.slots);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-3);
  }
  for (index_t t = 0; t < 3 * slots; ++t) {
    const auto q = fixtures::normal(of_group * width), k = fixtures::normal(width),
               v = fixtures::normal(width + 3);
    fixtures::step(any, kv, state, {q, k, v}, most, out);
    o.step(expected, fixtures::to_mat(q.data(), of_group, width),
           fixtures::to_mat(k.data(), 1, width)[0], fixtures::to_mat(v.data(), 1, width + 3)[0],
           most.slots, most.trigger);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-3);
  }
}

TEST_CASE("in a stream a head with more slots has more of what stands out, by their bytes",
          "[fold]") {
  const fold policy = fold{}.sharing(40);
  constexpr index_t dim = 8;
  const index_t more = 60, slots = policy.slots_beside_pins() + more, steps = 4 * slots;
  fixtures::cache<float> kv{{.heads = 1, .group = 1, .dim = dim, .capacity = slots + 1}};
  const any_policy any = policy;
  auto state = fixtures::make_state(any, kv);
  std::vector<float> out(dim);
  std::vector<std::vector<float>> odd;  // by far the longest; eight in a row are nearly alike,
  std::vector<float> like;              // so that those of them that are no pins would be merged
  for (index_t t = 0; t < steps; ++t) {
    auto k = fixtures::normal(dim);
    if (t >= 10 && t < 10 + 56) {
      like = t % 8 == 2 ? k : like;
      std::ranges::transform(k, like, k.begin(),
                             [](float x, float y) { return 6 * y + 0.05F * x; });
      odd.push_back(k);
    }
    fixtures::step(any, kv, state, {fixtures::normal(dim), k, fixtures::normal(dim)},
                   kvmeld::budget_within(any, slots), out);
  }
  index_t kept = 0, alone = 0;
  for (const oracle::slot& s : fixtures::to_oracle(kv.head(0)).slots) {
    alone += s.log_mass == 0 ? 1 : 0;
    kept += std::ranges::any_of(odd, [&](const auto& k) {
      return std::ranges::equal(k, s.key,
                                [](float a, double b) { return a == static_cast<float>(b); });
    });
  }
  CHECK(kept == 56);
  CHECK(alone >= more);
}

}  // namespace fold_streams_test
