// SPDX-License-Identifier: MIT
// fold's gain: against its oracle, and what must hold of any.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/peers.hpp"
#include "oracle/oracle.hpp"
#include "support/fixtures.hpp"
#include "support/model.hpp"
#include "support/terms.hpp"

namespace fold_gain_test {

using namespace small_model;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::fold;

constexpr index_t tokens = 240, slots = 40;

/// A prompt of all heads, some with keys that their queries tell apart well, compressed to
/// `slots` each on average.
struct compressed {
  model_cache kv;
  kvmeld::compressor<fold> meld;

  compressed(const fold& policy, const prompt_rows& rows, const budget& b, index_t room = 60)
      : kv(tokens + room), meld(kv, policy, b) {
    read(meld, kv, rows, 0, rows.tokens);
    meld.end_prompt(0);
  }
  kvmeld::head_ref head(index_t h) { return kv.head(h); }
};

/// Prompts of which heads get unlike numbers of pins.
prompt_rows uneven() {
  prompt_rows rows(tokens);
  for (std::size_t l = 0; l < rows.k.size(); ++l) {
    for (std::size_t i = 0; i < rows.k[l].size(); ++i) {
      const auto h = i / dim % kv_heads_of;
      rows.k[l][i] *= 0.5F * static_cast<float>(l * kv_heads_of + h + 1);
    }
  }
  return rows;
}

std::vector<index_t> heads_of_request() {
  std::vector<index_t> all;
  for (index_t l = 0; l < layers_of; ++l) {
    for (index_t i = 0; i < kv_heads_of; ++i) {
      all.push_back(model_cache::of(l, 0).first + i);
    }
  }
  return all;
}

/// The formula, of a head with `length` slots after its prompt.
double gain_of(const fold& shared, index_t length) {
  return oracle::log_gain(shared.gain, length - shared.clusters, shared.mean, tokens);
}

TEST_CASE("fold's gain is its oracle's: of a prompt, and of one that follows", "[oracle][fold]") {
  const index_t of_group = GENERATE(1, 3), mean = GENERATE(3, 13, 100);
  const float gain = GENERATE(0.0F, 0.4F, 1.0F);
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::merged_terms));
  INFO(terms.name << ", group " << of_group << ", mean " << mean << ", gain " << gain);
  constexpr index_t width = 8, chunk = 48;
  fold policy{.pins = fold::pin_rule::scores, .clusters = 9};
  policy.gain = gain, policy.mean = mean;
  const oracle::fold o{.recent = 8,
                       .outliers = 0.5,
                       .pool = 5,
                       .leverage_ridge = 1,
                       .outlying = 1.6,
                       .by_scores = true,
                       .clusters = 9,
                       .pin_gain = gain,
                       .mean_slots = mean};
  fixtures::cache<float> kv{terms.shape(1, of_group, width, slots + chunk)};
  auto state = fixtures::make_state(any_policy(policy), kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  for (index_t round = 0; round < 2; ++round) {
    const auto k = fixtures::normal(chunk * width), v = fixtures::normal(chunk * width);
    kv.append(0, k, v);
    const auto keys = fixtures::to_mat(k.data(), chunk, width),
               values = fixtures::to_mat(v.data(), chunk, width);
    for (std::size_t t = 0; t < keys.size(); ++t) {
      append(expected, keys[t], values[t], round * chunk + static_cast<index_t>(t));
    }
    const fixtures::queries queries(chunk, of_group, width);
    fixtures::observe(any_policy(policy), kv, state, queries.view());
    const auto reference = evaluate::lookahead(kv, queries.view());
    fixtures::compress(any_policy(policy), kv, state, reference.view(), budget{slots});
    o.score(expected, queries.tensor());
    o.prompt(expected, queries.tensor(), {}, slots);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-3);
    const auto raised = std::ranges::count_if(
        expected.slots, [](const oracle::slot& s) { return s.single && s.log_mass > 0.01; });
    CHECK((raised > 0) == (gain > 0 && mean < 30));
  }
}

TEST_CASE("a head with more pins than its share has the gain on them, and else the same bytes",
          "[fold]") {
  const prompt_rows rows = uneven();
  const fold policy = fold{}.sharing(slots);
  compressed with(fold{}, rows, budget::shared(slots)),
      without(fold{.gain = 0}, rows, budget::shared(slots));
  index_t gained = 0, others = 0;
  for (const index_t h : heads_of_request()) {
    CAPTURE(h);
    const auto a = with.head(h), b = without.head(h);
    const double gain = gain_of(policy, b.length());
    if (gain == 0) {
      ++others;
      CHECK(same_head(a, b));
      continue;
    }
    ++gained;
    REQUIRE(a.length() == b.length());
    index_t raised = 0;
    for (index_t s = 0; s < a.length(); ++s) {
      CHECK(a.position(s) == b.position(s));
      bool same_value = true;
      for (index_t i = 0; i < dim; ++i) {
        CHECK(a.key(s)[i] == b.key(s)[i]);
        same_value = same_value && a.value(s)[i] == b.value(s)[i];
      }
      if (a.log_mass(s) != b.log_mass(s)) {
        ++raised;
        CHECK(same_value);
        CHECK(b.log_mass(s) == 0);
        CHECK(a.log_mass(s) == Approx(gain));
      }
    }
    CHECK(raised == b.length() - policy.slots_beside_pins());
  }
  CHECK((gained > 0 && others > 0));
}

TEST_CASE("a model whose heads have equal pins gets no gain", "[fold]") {
  const prompt_rows rows = uneven();
  const fold policy = fold{}.sharing(slots);
  fold without = policy;
  without.gain = 0;
  compressed a(policy, rows, {slots}), b(without, rows, {slots});
  fold no_mean = policy;
  no_mean.mean = 0;
  compressed c(no_mean, rows, {slots + 30}), d(without, rows, {slots + 30});
  for (const index_t h : heads_of_request()) {
    CHECK(same_head(a.head(h), b.head(h)));
    CHECK(same_head(c.head(h), d.head(h)));
  }
}

TEST_CASE("a gain is kept by copies, by what is saved and loaded, and by steps", "[fold]") {
  const prompt_rows rows = uneven();
  compressed from(fold{}, rows, budget::shared(slots, 30)),
      to(fold{}, prompt_rows(tokens), budget::shared(slots, 30));
  from.meld.copy(0, 1);
  std::stringstream bytes(std::ios::in | std::ios::out | std::ios::binary);
  from.meld.save(bytes, 0);
  to.meld.load(bytes, 0);
  const fold policy = fold{}.sharing(slots, 30);
  const auto raised = [&](const kvmeld::head_ref& head, double gain) {
    index_t n = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      n += head.log_mass(s) == Approx(gain) ? 1 : 0;
    }
    return n;
  };
  std::vector<double> gains;
  for (const index_t h : heads_of_request()) {
    gains.push_back(gain_of(policy, from.head(h).length()));
  }
  CHECK(*std::ranges::max_element(gains) > 0.01);
  const auto of_layer = static_cast<index_t>(kv_heads_of);
  for (index_t step = 0; step < 90; ++step) {
    for (index_t l = 0; l < layers_of; ++l) {
      const auto q = normal(of_layer * group * dim), k = normal(of_layer * dim),
                 v = normal(of_layer * dim);
      std::vector<float> a(q.size()), b(q.size()), c(q.size());
      from.meld.step(model_cache::of(l, 0), {q, k, v}, a);
      from.meld.step(model_cache::of(l, 1), {q, k, v}, b);
      to.meld.step(model_cache::of(l, 0), {q, k, v}, c);
      CHECK((a == b && a == c));
    }
  }
  std::size_t i = 0;
  for (const index_t h : heads_of_request()) {
    const double gain = gains[i++];
    CHECK(same_head(from.head(h), to.head(h)));
    CHECK((gain == 0 || raised(from.head(h), gain) > 0));
    for (index_t s = 0; s < from.head(h).length(); ++s) {
      CHECK(std::isfinite(from.head(h).log_mass(s)));
    }
  }
}

TEMPLATE_TEST_CASE("a gain is the same number in every storage", "[fold]", Eigen::half,
                   kvmeld::q8_0) {
  constexpr index_t width = 32, length = 60;
  const fold policy = fold{}.sharing(20);
  fixtures::cache<TestType> kv{{.heads = 1, .group = 1, .dim = width, .capacity = tokens}};
  kv.append(0, normal(tokens * width), normal(tokens * width));
  const any_policy any = policy;
  auto state = fixtures::make_state(any, kv);
  const fixtures::queries queries(tokens, 1, width);
  fixtures::observe(any, kv, state, queries.view());
  const auto reference = evaluate::lookahead(kv, queries.view());
  fixtures::compress(any, kv, state, reference.view(), budget{length});
  const auto head = kv.head(0);
  index_t raised = 0;
  for (index_t s = 0; s < head.length(); ++s) {
    raised += head.log_mass(s) == Approx(gain_of(policy, length)) ? 1 : 0;
  }
  CHECK(raised == length - policy.slots_beside_pins());
}

TEST_CASE(
    "fold's gain is finite whatever the heads' pins, more where less than a tenth is kept, and "
    "less where more is",
    "[fold]") {
  constexpr index_t most = std::numeric_limits<index_t>::max();
  const auto gain = [](index_t pinned, index_t mean, index_t prompt, float g = 1) {
    return kvmeld::detail::fold_pins{.gain = g, .mean = mean}.log_gain(pinned, prompt);
  };
  CHECK(gain(most, 1, most) == Approx(std::log(2.0) * 62));
  CHECK(gain(most, most, most) == 0);
  CHECK(gain(most, most - 1, most) >= 0);
  CHECK(gain(most, 0, most) == 0);
  CHECK(gain(0, 1, 1) == 0);
  CHECK(gain(1, 1, most) == 0);
  CHECK(gain(20, 10, 100, 0.4F) == Approx(0.4 * std::log(2.0)));
  CHECK(gain(20, 10, 125, 0.4F) == Approx(0.5 * std::log(2.0)));
  CHECK(gain(20, 10, 200, 0.4F) == Approx(0.8 * std::log(2.0)));
  CHECK(gain(20, 10, 230, 0.4F) == Approx(0.8 * std::log(2.0)));
  CHECK(gain(20, 10, 90, 0.4F) == Approx(0.4 * (1.5 - 5 / 9.0) * std::log(2.0)));
  CHECK(gain(20, 10, 1000, 0.4F) == Approx(0.8 * std::log(2.0)));
  CHECK(gain(20, 10, 1000, 0) == 0);
  CHECK(gain(20, 10, 50, 0.4F) == Approx(0.2 * std::log(2.0)));
  CHECK(gain(20, 10, 40, 0.4F) == Approx(0.1 * std::log(2.0)));
  CHECK(gain(20, 10, 33, 0.4F) == 0);
}

TEST_CASE("fold refuses a gain that is none", "[errors][fold]") {
  using Catch::Contains;
  for (const float g : {-0.1F, 1.1F, std::numeric_limits<float>::quiet_NaN()}) {
    CHECK_THROWS_WITH(validate(fold{.gain = g}), Contains("fold: expected gain in [0, 1]"));
  }
  CHECK_THROWS_WITH(validate(fold{.mean = -1}), Contains("mean in [0, 16777216], got -1"));
  CHECK(kvmeld::make_policy<kvmeld::any_policy_or_peer>("fold:gain=0.2,mean=90").name() == "fold");
}

}  // namespace fold_gain_test
