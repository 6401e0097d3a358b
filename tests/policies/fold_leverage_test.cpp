// SPDX-License-Identifier: MIT
// fold's scores weighed by the leverage in all heads: against the oracle, and what must hold.
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <sstream>
#include <vector>

#include "kvmeld/peers.hpp"
#include "oracle/model_leverage.hpp"
#include "support/fixtures.hpp"
#include "support/model.hpp"

namespace fold_leverage_test {

using namespace small_model;
using kvmeld::budget;
using kvmeld::fold;

constexpr index_t tokens = 160, slots = 40, count = layers_of * kv_heads_of;
constexpr auto score = fold::prompt_score, weight = fold::score_weight;

/// Prompts whose heads have unlike scores.
prompt_rows uneven() {
  prompt_rows rows(tokens);
  for (std::size_t l = 0; l < rows.k.size(); ++l) {
    for (std::size_t i = 0; i < rows.k[l].size(); ++i) {
      rows.k[l][i] *= 0.5F * static_cast<float>(l * kv_heads_of + i / dim % kv_heads_of + 1);
    }
  }
  return rows;
}

fold with(float exponent) { return fold{.leverage_exponent = exponent}; }

/// Heads of the first request.
index_t place(std::size_t i) {
  const auto at = static_cast<index_t>(i);
  return model_cache::of(at / kv_heads_of, 0).first + at % kv_heads_of;
}

/// A model's heads that were measured, before their slots are divided.
struct measured {
  model_cache kv{tokens + 60};
  fold policy;
  std::vector<kvmeld::head_state> states;

  measured(const fold& p, const prompt_rows& rows) : policy(p.sharing(slots)) {
    for (std::size_t i = 0; i < count; ++i) {
      states.push_back(kvmeld::make_head_state(policy, kv.head(place(i))));
    }
    read(rows);
  }
  void read(const prompt_rows& rows) {
    for (index_t l = 0; l < layers_of; ++l) {
      rows.append(kv, l, 0, 0, rows.tokens);
      const kvmeld::queries q(rows.queries(l, 0, rows.tokens), rows.tokens, layer_spec);
      for (index_t h = 0; h < kv_heads_of; ++h) {
        q.of_head(h, [&](const auto& own) {
          kvmeld::held_queries held;
          kvmeld::observe_prompt(policy, kv.head(model_cache::of(l, 0).first + h),
                                 states[static_cast<std::size_t>(l * kv_heads_of + h)], held, own);
        });
      }
    }
  }
  void weigh(const std::vector<std::size_t>& order = {0, 1, 2, 3}) {
    const auto weights = kvmeld::score_weights(
        policy, order.size(), [&](std::size_t i) { return kv.head(place(order[i])); },
        [&](std::size_t i) -> kvmeld::head_state& { return states[order[i]]; });
    for (std::size_t i = 0; i < order.size(); ++i) {
      kvmeld::keep_weights(policy, weights[i], states[order[i]]);
    }
  }
};

struct compressed {
  model_cache kv;
  kvmeld::compressor<fold> meld;

  compressed(const fold& policy, const prompt_rows& rows, const budget& b = budget::shared(slots))
      : kv(tokens + 60), meld(kv, policy, b) {
    read(meld, kv, rows, 0, tokens);
    meld.end_prompt(0);
  }
  kvmeld::head_ref head(std::size_t i) { return kv.head(place(i)); }
};

bool same(compressed& a, compressed& b) {
  bool all = true;
  for (std::size_t i = 0; i < count; ++i) {
    all = all && same_head(a.head(i), b.head(i));
  }
  return all;
}

TEST_CASE("scores are weighed by the leverage in all heads as the oracle says", "[oracle][fold]") {
  const float exponent = GENERATE(0.5F, 1.0F, 2.0F);
  measured m(with(exponent), uneven());
  std::vector<oracle::head> heads;
  std::vector<std::vector<float>> before;
  for (std::size_t i = 0; i < count; ++i) {
    heads.push_back(fixtures::to_oracle(m.kv.head(place(i))));
    const auto s = m.states[i].column(score);
    before.emplace_back(s.begin(), s.end());
  }
  const auto expected = oracle::leverage_weights(heads, {}, exponent);
  m.weigh();
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < tokens; ++s) {
      const double w = expected.at(static_cast<int>(s));
      CHECK(m.states[i].column(weight)[s] == Approx(w).epsilon(1e-4));
      CHECK(m.states[i].column(score)[s] == Approx(before[i][s] * w).epsilon(1e-4));
    }
  }
}

TEST_CASE("a compressor divides slots and pins by the scores that it has weighed", "[fold]") {
  const prompt_rows rows = uneven();
  measured m(with(2), rows);
  m.weigh();
  const auto shared = kvmeld::shared_slots::of(m.policy);
  std::vector<std::vector<float>> scores(count);
  for (std::size_t i = 0; i < count; ++i) {
    kvmeld::add_shared_scores(m.kv.head(place(i)), m.states[i].column(score), shared, scores[i]);
  }
  const auto divided = kvmeld::divide_slots(scores, shared, slots, tokens);
  compressed c(with(2), rows), unweighed(with(0), rows);
  CHECK(!same(c, unweighed));
  for (std::size_t i = 0; i < count; ++i) {
    const auto head = c.head(i);
    REQUIRE(head.length() == divided[i]);
    // What is pinned is above all that is not.
    std::vector<float> ordered = scores[i];
    std::ranges::sort(ordered, std::greater<>());
    const auto pins = static_cast<std::size_t>(divided[i] - m.policy.slots_beside_pins());
    for (std::size_t s = 0; s < scores[i].size() && pins > 0; ++s) {
      bool held = false;
      for (index_t r = 0; r < head.length(); ++r) {
        held = held || head.position(r) == shared.sinks + static_cast<index_t>(s);
      }
      CHECK((held || scores[i][s] < ordered[pins - 1]));
    }
  }
}

TEST_CASE("without an exponent fold has no weights, and weighing changes no score", "[fold]") {
  measured m(with(0), uneven());
  CHECK(kvmeld::declared(m.policy).slot_stats().size() == 2);
  const std::vector<kvmeld::head_state> before = m.states;
  m.weigh();
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(same_state(m.states[i], before[i]));
  }
}

TEST_CASE("heads whose keys are all alike weigh nothing", "[fold]") {
  prompt_rows rows(tokens);
  for (std::vector<float>& of_layer : rows.k) {
    std::ranges::fill(of_layer, 0.0F);
  }
  measured m(with(2), rows);
  const std::vector<kvmeld::head_state> before = m.states;
  m.weigh();
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(std::ranges::equal(m.states[i].column(score), before[i].column(score)));
    CHECK(std::ranges::count(m.states[i].column(weight), 1.0F) == tokens);
  }
  compressed a(with(2), rows), b(with(0), rows);
  CHECK(same(a, b));
}

TEST_CASE("neither the order of heads nor a second weighing shows in weighed scores", "[fold]") {
  const prompt_rows rows = uneven();
  measured a(with(2), rows), b(with(2), rows);
  a.weigh(), b.weigh({2, 0, 3, 1});
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(same_state(a.states[i], b.states[i]));
  }
  b.weigh();
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(same_state(a.states[i], b.states[i]));
  }
}

TEST_CASE("a later prompt's scores of a slot are multiplied by the weight that it has", "[fold]") {
  const prompt_rows rows = uneven();
  prompt_rows next(20);
  for (std::vector<float>& of_layer : next.q) {  // it looks up more than the prompt before
    std::ranges::for_each(of_layer, [](float& x) { x *= 4; });
  }
  measured weighed(with(2), rows), plain(with(0), rows);
  weighed.weigh();
  const std::vector<kvmeld::head_state> before = plain.states;
  weighed.read(next), plain.read(next);
  index_t raised = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < tokens + 20; ++s) {
      const float w = weighed.states[i].column(weight)[s], x = plain.states[i].column(score)[s];
      CHECK((w > 0) == (s < tokens));  // new ones hold their leverage until they are weighed
      CHECK(weighed.states[i].column(score)[s] == Approx(w > 0 ? w * x : x).epsilon(1e-5));
      raised += s < tokens && x > before[i].column(score)[s] ? 1 : 0;
    }
  }
  CHECK(raised > 10);
}

TEST_CASE("weights are kept by copies and by what is saved, as prompts that follow show",
          "[fold]") {
  const prompt_rows rows = uneven(), next(20);
  const budget shared = budget::shared(slots, 30);
  compressed a(with(2), rows, shared), c(with(2), prompt_rows(tokens), shared);
  a.meld.copy(0, 1);
  std::stringstream bytes(std::ios::in | std::ios::out | std::ios::binary);
  a.meld.save(bytes, 0);
  c.meld.load(bytes, 0);
  for (index_t request : {0, 1}) {
    read(a.meld, a.kv, next, request, next.tokens);
    a.meld.end_prompt(request);
  }
  read(c.meld, c.kv, next, 0, next.tokens);
  c.meld.end_prompt(0);
  CHECK(same(a, c));
  for (std::size_t i = 0; i < count; ++i) {
    const auto copied = place(i) + kv_heads_of;
    CHECK(same_head(a.head(i), a.kv.head(copied)));
    CHECK(same_state(a.meld.state(place(i)), a.meld.state(copied)));
    CHECK(same_state(a.meld.state(place(i)), c.meld.state(place(i))));
  }
}

TEST_CASE("slots of a prompt in chunks have the leverage that they have in the prompt", "[fold]") {
  const prompt_rows rows = uneven();
  model_cache in_chunks(tokens + 60), at_once(tokens + 60);
  kvmeld::compressor chunks(in_chunks, with(2), budget::shared(slots)),
      whole(at_once, with(2), budget::shared(slots));
  read(chunks, in_chunks, rows, 0, 50), read(whole, at_once, rows, 0, tokens);
  for (std::size_t i = 0; i < count; ++i) {
    const auto held = chunks.state(place(i)).column(weight);
    CHECK(std::ranges::equal(held, whole.state(place(i)).column(weight)));
    CHECK(std::ranges::all_of(held, [](float x) { return x < 0; }));
  }
  chunks.end_prompt(0);
  for (std::size_t i = 0; i < count; ++i) {
    const auto kept = chunks.state(place(i)).column(weight);
    CHECK(std::ranges::all_of(kept, [](float x) { return x > 0; }));
  }
}

TEST_CASE("heads with budgets of their own have no other heads to be weighed by", "[fold]") {
  const prompt_rows rows = uneven();
  compressed a(with(2).sharing(slots), rows, {slots}), b(with(0).sharing(slots), rows, {slots});
  CHECK(same(a, b));
}

TEST_CASE("fold refuses a leverage exponent that is none", "[errors][fold]") {
  for (const float e : {-0.1F, 2.1F, std::numeric_limits<float>::quiet_NaN()}) {
    CHECK_THROWS_WITH(validate(with(e)),
                      Catch::Contains("fold: expected leverage_exponent in [0, 2]"));
  }
  CHECK(kvmeld::make_policy<kvmeld::any_policy_or_peer>("fold:leverage_exponent=2").name() ==
        "fold");
}

TEST_CASE("an end_prompt that is refused leaves scores and weights as they are", "[fold][errors]") {
  const prompt_rows rows = uneven();
  model_cache kv(tokens + 60);
  kvmeld::compressor meld(kv, with(2), budget::shared(slots));
  for (index_t l = 0; l < layers_of; ++l) {
    rows.append(kv, l, 0, 0, tokens);
  }
  const auto give = [&](index_t l) {
    meld.prompt(model_cache::of(l, 0),
                kvmeld::queries(rows.queries(l, 0, tokens), tokens, layer_spec));
  };
  give(0);
  const auto own = meld.state(0).column(score);
  const std::vector<float> before(own.begin(), own.end());
  CHECK_THROWS_WITH(meld.end_prompt(0), Catch::Contains("expected the prompt's queries, got none"));
  CHECK(std::ranges::equal(meld.state(0).column(score), before));
  CHECK(std::ranges::all_of(meld.state(0).column(weight), [](float w) { return w < 0; }));
  give(1), meld.end_prompt(0);
  compressed whole(with(2), rows);
  for (index_t h = 0; h < kv_heads_of; ++h) {
    CHECK(same_head(kv.head(h), whole.kv.head(h)));
  }
}

}  // namespace fold_leverage_test
