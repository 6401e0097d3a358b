// SPDX-License-Identifier: MIT
// fold with pins by scores: against its oracle, and over all heads of a model.
#include <catch2/catch.hpp>
#include <numeric>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/peers.hpp"
#include "oracle/oracle.hpp"
#include "support/fixtures.hpp"
#include "support/terms.hpp"

namespace fold_scores_test {

using fixtures::index_t;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::fold;

constexpr index_t heads = 5, group = 2, dim = 8, tokens = 150;

/// A model's heads, some of them with keys that their queries tell apart well.
struct model {
  fixtures::cache<float> kv;
  std::vector<float> q;  // [tokens, heads · group, dim]

  explicit model(index_t capacity = tokens + 20)
      : kv({.heads = heads, .group = group, .dim = dim, .capacity = capacity}) {
    for (index_t h = 0; h < heads; ++h) {
      kv.append(h, fixtures::normal(tokens * dim, 0.5F * static_cast<float>(h + 1)),
                fixtures::normal(tokens * dim));
    }
    q = fixtures::normal(tokens * heads * group * dim);
  }
  kvmeld::query_view<float> queries() const {
    return kvmeld::prompt_queries(q.data(), tokens, heads, group, dim);
  }
};

/// Scores of the tokens between the sinks and the latest `[heads, tokens − ...]`.
std::vector<float> candidates(const fixtures::state& state, const fold& policy) {
  std::vector<float> all;
  for (index_t h = 0; h < heads; ++h) {
    const auto s = state[h].column(fold::prompt_score);
    all.insert(all.end(), s.begin() + policy.sinks, s.end() - policy.prompt_recent);
  }
  return all;
}

/// Log-mass of pins in a head with so many pinned slots.
double gain_of(const fold& policy, index_t pinned) {
  return oracle::log_gain(policy.gain, pinned, policy.mean, tokens);
}

std::vector<float> bytes_of(fixtures::cache<float>& kv) {
  std::vector<float> all;
  for (index_t h = 0; h < heads; ++h) {
    const auto own = fixtures::bytes_of(kv.head(h));
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

/// All heads, with so many pins each.
template <class Policy>
void compress(const Policy& policy, const fold& shared, model& m, fixtures::state& state,
              const std::vector<index_t>& pins) {
  std::vector<budget> budgets;
  for (const index_t p : pins) {
    budgets.push_back({shared.slots_beside_pins() + p});
  }
  const auto reference = evaluate::lookahead(m.kv, m.queries(), {.count = 40});
  fixtures::compress(policy, m.kv, state, reference.view(), std::span<const budget>(budgets));
}

TEST_CASE("fold by scores is its oracle: chunks, groups, clusters given or a share", "[oracle]") {
  const index_t of_group = GENERATE(1, 3), width = GENERATE(7, 16), clusters = GENERATE(0, 9);
  const index_t slots = 40, chunk = 48, of_values = width == 7 ? 12 : 9;
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::merged_terms));
  INFO(terms.name << ", dim " << width << ", group " << of_group);
  fold policy;
  policy.pins = fold::pin_rule::scores, policy.clusters = clusters;
  const oracle::fold o{.sinks = 4,
                       .recent = 8,
                       .outliers = 0.5,
                       .pool = 5,
                       .leverage_ridge = 1,
                       .outlying = 1.6,
                       .by_scores = true,
                       .clusters = clusters};
  fixtures::cache<float> kv{
      terms.shape(1, of_group, width, slots + chunk, fixtures::default_rope, of_values)};
  auto state = fixtures::make_state(any_policy(policy), kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  for (int round = 0; round < 2; ++round) {
    const auto k = fixtures::normal(chunk * width), v = fixtures::normal(chunk * of_values);
    kv.append(0, k, v);
    for (index_t t = 0; t < chunk; ++t) {
      append(expected, fixtures::to_mat(&k[static_cast<std::size_t>(t * width)], 1, width)[0],
             fixtures::to_mat(&v[static_cast<std::size_t>(t * of_values)], 1, of_values)[0],
             round * chunk + t);
    }
    const fixtures::queries queries(chunk, of_group, width);
    fixtures::observe(any_policy(policy), kv, state, queries.view());
    const auto reference = evaluate::lookahead(kv, queries.view());
    fixtures::compress(any_policy(policy), kv, state, reference.view(), budget{slots});
    o.score(expected, queries.tensor());
    o.prompt(expected, queries.tensor(), {}, slots);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-3);
  }
}

TEST_CASE("pins by one threshold: budgets sum exactly, and the best keep their bytes", "[fold]") {
  model m;
  const index_t slots = GENERATE(24, 40, 75), room = GENERATE(0, 100);
  const fold policy = fold{}.sharing(slots, room);
  const any_policy any = policy;
  auto state = fixtures::make_state(any, m.kv);
  fixtures::observe(any, m.kv, state, m.queries());
  const auto scores = candidates(state, policy);
  const index_t total = heads * (slots - policy.slots_beside_pins()),
                most = tokens - policy.slots_beside_pins() - 1;
  const auto pins = kvmeld::global_budgets(scores, heads, total, most);
  CHECK(*std::ranges::max_element(pins) > *std::ranges::min_element(pins));
  std::vector<oracle::head> before;
  for (index_t h = 0; h < heads; ++h) {
    before.push_back(fixtures::to_oracle(m.kv.head(h)));
  }
  compress(any, policy, m, state, pins);
  index_t all = 0;
  const std::size_t each = scores.size() / heads;
  for (index_t h = 0; h < heads; ++h) {
    const auto made = fixtures::to_oracle(m.kv.head(h));
    all += m.kv.head(h).length();
    const auto i = static_cast<std::size_t>(h);
    std::vector<std::size_t> order(each);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::greater{},
                             [&](std::size_t j) { return scores[i * each + j]; });
    const auto gain = Approx(gain_of(policy, pins[i] + policy.sinks + policy.prompt_recent));
    for (index_t p = 0; p < pins[i]; ++p) {
      const auto at = order[static_cast<std::size_t>(p)] + static_cast<std::size_t>(policy.sinks);
      const oracle::slot& was = before[i].slots[at];
      CHECK(std::ranges::any_of(made.slots, [&](const oracle::slot& s) {
        return s.key == was.key && s.value == was.value && s.log_mass == gain &&
               s.position == was.position;
      }));
    }
  }
  CHECK(all == heads * slots);
}

TEST_CASE("a profile of the thresholds gives the same cache", "[fold]") {
  const index_t slots = 40;
  const fold policy = fold{}.sharing(slots);
  const any_policy any = policy;
  model a;
  model b = a;
  auto state = fixtures::make_state(any, a.kv);
  fixtures::observe(any, a.kv, state, a.queries());
  const index_t total = heads * (slots - policy.slots_beside_pins()),
                most = tokens - policy.slots_beside_pins() - 1;
  const auto pins = kvmeld::global_budgets(candidates(state, policy), heads, total, most);
  compress(any, policy, a, state, pins);

  kvmeld::budget_profile profile(heads);
  profile.add(pins);
  auto again = fixtures::make_state(any, b.kv);
  const auto by_profile = profile.budgets(total, most);
  const auto reference = evaluate::lookahead(b.kv, b.queries(), {.count = 40});
  for (index_t h = 0; h < heads; ++h) {  // a layer is done before the next one is read
    const auto head = b.kv.head(h);
    const auto ahead = reference.view().of(h);
    observe(any, head, again[h], b.queries().of(h));
    observe(any, head, again[h], ahead);
    compress(any, head, again[h], again.workspace(),
             budget{policy.slots_beside_pins() + by_profile[static_cast<std::size_t>(h)]}, ahead);
  }
  CHECK(bytes_of(a.kv) == bytes_of(b.kv));
}

TEST_CASE("what the prefill knows of its rows is taken in the place of the query's own pass",
          "[fold]") {
  model m;
  const any_policy any = fold{}.sharing(40);
  auto state = fixtures::make_state(any, m.kv);
  fixtures::observe(any, m.kv, state, m.queries());
  for (index_t h = 0; h < heads; ++h) {
    const auto head = m.kv.head(h);
    auto view = m.queries().of(h);
    std::vector<float> log_sum_exp;
    for (index_t g = 0; g < group; ++g) {
      for (index_t i = 0; i < tokens; ++i) {
        auto seen = fixtures::to_oracle(head);
        seen.slots.resize(static_cast<std::size_t>(i) + 1);
        log_sum_exp.push_back(static_cast<float>(
            oracle::attend(seen, fixtures::to_mat(view.at(g, i), 1, dim)).lse[0]));
      }
    }
    std::vector<float> s(tokens);
    view.log_sum_exp = log_sum_exp.data();
    kvmeld::prompt_scores(head, view, {}, s);
    const auto column = state[h].column(fold::prompt_score);
    for (std::size_t j = 0; j < s.size(); ++j) {
      CHECK(s[j] == Approx(column[j]).epsilon(1e-4));
    }
  }
}

TEST_CASE("prompt and stream have pins by their lengths: the best by score, what stands out",
          "[fold]") {
  model m;
  const fold policy = fold{}.sharing(30);  // of heads that look things up, which get far more
  const any_policy any = policy;
  auto state = fixtures::make_state(any, m.kv);
  fixtures::observe(any, m.kv, state, m.queries());
  std::vector<std::vector<float>> scores;  // behind the sinks, the prompt's latest among them
  for (index_t h = 0; h < heads; ++h) {
    const auto column = state[h].column(fold::prompt_score);
    scores.emplace_back(column.begin() + policy.sinks, column.end());
  }
  const std::vector<index_t> pins(heads, 95);
  compress(any, policy, m, state, pins);
  const index_t slots = policy.slots_beside_pins() + 95;
  const budget in_decode = kvmeld::budget_within(any, slots);
  std::vector<float> out(heads * group * dim);
  constexpr index_t steps = 200, odd = 60;
  for (index_t t = 0; t < steps; ++t) {
    auto keys = fixtures::normal(heads * dim);
    for (float& x : keys) {
      x *= t == odd ? 4.0F : 1.0F;
    }
    fixtures::step(any, m.kv, state,
                   {fixtures::normal(heads * group * dim), keys, fixtures::normal(heads * dim)},
                   in_decode, out);
  }
  // Sinks, the latest, clusters; the rest by the lengths of prompt and stream.
  const index_t latest = std::min(policy.recent, policy.prompt_recent + 3 * policy.clusters / 4),
                most = std::min(index_t{95}, in_decode.slots - policy.sinks - latest - 2),
                room = most * tokens / (tokens + steps);
  REQUIRE((room > 20 && most - room > 20));
  const double gain = gain_of(policy, slots - policy.clusters);
  REQUIRE(gain > 0.2);
  for (index_t h = 0; h < heads; ++h) {
    CHECK(m.kv.head(h).length() <= slots);
    const auto& own = scores[static_cast<std::size_t>(h)];
    std::vector<index_t> order(own.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater{},
                             [&](index_t j) { return own[static_cast<std::size_t>(j)]; });
    const auto made = fixtures::to_oracle(m.kv.head(h));
    for (index_t p = 0; p < room; ++p) {
      const index_t position = order[static_cast<std::size_t>(p)] + policy.sinks;
      CHECK(std::ranges::any_of(made.slots, [&](const oracle::slot& s) {
        return s.position == position &&
               s.log_mass == Approx(position < tokens - policy.prompt_recent ? gain : 0);
      }));
    }
    CHECK(std::ranges::any_of(made.slots, [&](const oracle::slot& s) {
      return s.position == tokens + odd && s.log_mass == 0;
    }));
  }
}

TEST_CASE("fold by scores refuses what cannot be", "[errors][fold]") {
  using Catch::Contains;
  CHECK_THROWS_WITH(fold{}.sharing(5), Contains("slots to share, got 5"));
  fold policy;
  policy.score_share = 1;
  CHECK_THROWS_WITH(validate(policy), Contains("expected score_share in [0, 1), got 1"));
  policy = fold{};
  policy.clusters = -1;
  CHECK_THROWS_WITH(validate(policy), Contains("clusters in [0, 16777216], got -1"));
  const fold shared = fold{}.sharing(88);
  CHECK((shared.prompt_recent == 8 && shared.recent == 22));
  CHECK(shared.clusters == 23);  // 0.3 of 76
  CHECK(kvmeld::declared(shared).min_budget() == shared.slots_beside_pins());
}

TEST_CASE("fold by scores keeps fewer latest tokens where a question has room", "[fold]") {
  using Catch::Contains;
  const fold alone = fold{}.sharing(88), narrow = fold{}.sharing(88, 23),
             roomy = fold{}.sharing(88, 24);
  CHECK((narrow.prompt_recent == alone.prompt_recent && narrow.clusters == alone.clusters));
  CHECK((roomy.prompt_recent == 2 && roomy.recent == 22));
  CHECK(roomy.clusters == 12);  // 0.15 of 82
  CHECK((fold{.recent = 0}.sharing(88).prompt_recent == 0));
  CHECK_THROWS_WITH(fold{}.sharing(88, -1), Contains("slack slots, got -1"));
  CHECK_THROWS_WITH(validate(fold{.room_recent = -1}),
                    Contains("room_recent in [0, 16777216], got -1"));
  CHECK_THROWS_WITH(validate(fold{.room_share = 1}),
                    Contains("expected room_share in [0, 1), got 1"));
}

}  // namespace fold_scores_test
