// SPDX-License-Identifier: MIT
// A compressor's prompts are those of its heads by hand: whole, in chunks, of shared budgets.
#include <algorithm>  // std::ranges::equal
#include <catch2/catch.hpp>
#include <iterator>  // std::back_inserter
#include <utility>   // std::pair
#include <vector>

#include "../examples/evaluate/reference_queries.hpp"
#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace compressor_prompt_test {

using namespace small_model;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

/// What a policy is given of a prompt, by hand.
void compress_by_hand(const any_policy& p, model_cache& kv, fixtures::state& state,
                      const prompt_rows& prompt, index_t layer, index_t request, const budget& b) {
  const index_t first = model_cache::of(layer, request).first;
  const auto own = kvmeld::prompt_queries(prompt.q[static_cast<std::size_t>(layer)].data(),
                                          prompt.tokens, kv_heads_of, group, dim);
  fixtures::cache<float> one({.heads = kv_heads_of, .group = group, .dim = dim, .capacity = 1000});
  for (index_t h = 0; h < kv_heads_of; ++h) {
    kvmeld::detail::copy_slots(kv.head(first + h), one.head(h));
  }
  const bool looks_ahead = p.name() == "fold", spreads = p.name() == "attention_matching";
  const auto chosen = looks_ahead ? evaluate::lookahead(one, own) : evaluate::spread(one, own);
  for (index_t h = 0; h < kv_heads_of; ++h) {
    kvmeld::head_state& s = state[first + h];
    if (!looks_ahead || kvmeld::declared(p).slot_stats().size() > 1) {
      kvmeld::observe(p, kv.head(first + h), s, own.of(h));
    }
    if (looks_ahead) {
      kvmeld::observe(p, kv.head(first + h), s, chosen.view().of(h));
    }
    kvmeld::compress(p, kv.head(first + h), s, state.workspace(), b,
                     looks_ahead || spreads ? chosen.view().of(h) : own.of(h));
  }
}

TEST_CASE("compressor: a prompt and steps are those of its heads by hand, for every policy") {
  for (const auto& example : fixtures::every_policy()) {
    CAPTURE(example.name);
    const index_t tokens = 90, slots = 48;
    model_cache kv(128), by_hand(128);
    const prompt_rows prompt(tokens);
    const bool decodes = kvmeld::declared(example.policy).supports_decode();
    const budget limit{.slots = slots, .trigger = decodes ? slots + 1 : 0};
    kvmeld::compressor meld(kv, example.policy, limit);
    fixtures::state state = fixtures::make_state(example.policy, by_hand);
    read(meld, kv, prompt, 1, tokens);
    meld.end_prompt(1);
    for (index_t l = 0; l < layers_of; ++l) {
      prompt.append(by_hand, l, 1, 0, tokens);
      compress_by_hand(example.policy, by_hand, state, prompt, l, 1, limit);
    }
    for (index_t step = 0; step < 6 && decodes; ++step) {
      for (index_t l = 0; l < layers_of; ++l) {
        const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim),
                   v = normal(kv_heads_of * dim);
        std::vector<float> out(q.size()), wanted(q.size());
        meld.step(model_cache::of(l, 1), {q, k, v}, out);
        for (index_t i = 0; i < kv_heads_of; ++i) {
          const index_t h = model_cache::of(l, 1).first + i;
          kvmeld::step(example.policy, by_hand.head(h), state[h], state.workspace(),
                       q.data() + i * group * dim, k.data() + i * dim, v.data() + i * dim, limit,
                       wanted.data() + i * group * dim);
        }
        CHECK(out == wanted);
      }
    }
    for (index_t h = 0; h < kv.heads(); ++h) {
      CAPTURE(h);
      CHECK(same_head(kv.head(h), by_hand.head(h)));
      if (meld.state(h).rests()) {
        const auto use = kvmeld::declared(example.policy).decode_use();
        state[h].rest(use.columns, use.memory);
      }
      CHECK(same_state(meld.state(h), state[h]));
    }
  }
}

TEST_CASE("compressor: a prompt in chunks is the prompt, for policies that measure it") {
  for (const auto& example : fixtures::every_policy()) {
    for (const index_t chunk : {1, 7, 40}) {
      CAPTURE(example.name, chunk);
      const index_t tokens = 90, slots = 48;
      model_cache kv(128), at_once(128);
      const prompt_rows prompt(tokens);
      kvmeld::compressor meld(kv, example.policy, budget{.slots = slots});
      kvmeld::compressor whole(at_once, example.policy, budget{.slots = slots});
      read(meld, kv, prompt, 0, chunk), meld.end_prompt(0);
      read(whole, at_once, prompt, 0, tokens), whole.end_prompt(0);
      for (index_t h = 0; h < kv.heads(); ++h) {
        CHECK(kv.head(h).length() == at_once.head(h).length());
        std::vector<index_t> a, b, both;
        for (index_t s = 0; s < kv.head(h).length(); ++s) {
          a.push_back(kv.head(h).position(s)), b.push_back(at_once.head(h).position(s));
        }
        std::ranges::sort(a), std::ranges::sort(b);
        std::ranges::set_intersection(a, b, std::back_inserter(both));
        CAPTURE(h, both.size());
        // A spread of queries is another for other chunks, and scores of a chunk see no later keys.
        const bool nearly = example.name == "fold by scores" ||
                            example.name == "fold that scores in decode" ||
                            example.name.starts_with("attention_matching");
        CHECK(both.size() * 10 >= a.size() * (nearly ? 6 : 9));
        const bool looks_ahead = example.name == "fold";
        CHECK((nearly || looks_ahead || same_head(kv.head(h), at_once.head(h))));
      }
    }
  }
}

TEST_CASE("compressor: shared budgets are one threshold over the model's scores") {
  kvmeld::fold by_scores;
  by_scores.pins = kvmeld::fold::pin_rule::scores;
  const index_t tokens = 120, slots = 40;
  model_cache kv(tokens + 1), by_hand(tokens + 1);
  const prompt_rows prompt(tokens);
  kvmeld::compressor meld(kv, kvmeld::fold{}, budget::shared(slots, 0));
  read(meld, kv, prompt, 1, tokens);
  meld.end_prompt(1);

  const kvmeld::fold f = kvmeld::fold{}.sharing(slots);
  std::vector<float> scores;
  std::vector<index_t> heads;
  for (index_t l = 0; l < layers_of; ++l) {
    prompt.append(by_hand, l, 1, 0, tokens);
    const auto own = kvmeld::prompt_queries(prompt.q[static_cast<std::size_t>(l)].data(), tokens,
                                            kv_heads_of, group, dim);
    for (index_t i = 0; i < kv_heads_of; ++i) {
      const index_t h = model_cache::of(l, 1).first + i;
      heads.push_back(h);
      std::vector<float> score(static_cast<std::size_t>(tokens));
      kvmeld::prompt_scores(by_hand.head(h), own.of(i), {}, score);
      scores.insert(scores.end(), score.begin() + f.sinks, score.end() - f.prompt_recent);
    }
  }
  const auto pins =
      kvmeld::global_budgets(scores, static_cast<index_t>(heads.size()),
                             static_cast<index_t>(heads.size()) * (slots - f.slots_beside_pins()),
                             tokens - f.slots_beside_pins() - 1);
  index_t sum = 0;
  bool uneven = false;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const index_t wanted = f.slots_beside_pins() + pins[i];
    CHECK(kv.head(heads[i]).length() == wanted);
    sum += kv.head(heads[i]).length(), uneven = uneven || wanted != slots;
  }
  CHECK(sum == static_cast<index_t>(heads.size()) * slots);
  CHECK(uneven);
}

TEST_CASE("compressor: tokens that came without queries share in a budget by a fresh score") {
  for (const auto& example : fixtures::every_policy()) {
    if (!kvmeld::declared(example.policy).shares()) {  // refused
      continue;
    }
    CAPTURE(example.name);
    const index_t tokens = 90, measured = 60, slots = 48;
    model_cache kv(128), fresh_kv(128);
    const auto b = budget::shared(slots, 0);
    kvmeld::compressor meld(kv, example.policy, b), fresh(fresh_kv, example.policy, b);
    read(meld, kv, prompt_rows(tokens), 1, tokens);  // another request's scores, of as many tokens
    meld.clear(1);
    const prompt_rows prompt(tokens);
    for (const auto& [compressor, cache] : {std::pair(&meld, &kv), std::pair(&fresh, &fresh_kv)}) {
      for (index_t l = 0; l < layers_of; ++l) {
        prompt.append(*cache, l, 1, 0, measured);
        compressor->prompt(model_cache::of(l, 1),
                           kvmeld::queries(prompt.queries(l, 0, measured), measured, layer_spec));
        prompt.append(*cache, l, 1, measured, tokens);
      }
      compressor->end_prompt(1);
    }
    index_t sum = 0;
    for (index_t l = 0; l < layers_of; ++l) {
      for (index_t i = 0; i < kv_heads_of; ++i) {
        const index_t h = model_cache::of(l, 1).first + i;
        CAPTURE(h);
        CHECK(kv.head(h).length() == fresh_kv.head(h).length());
        CHECK(same_head(kv.head(h), fresh_kv.head(h)));
        sum += kv.head(h).length();
      }
    }
    CHECK(sum == layers_of * kv_heads_of * slots);
  }
}

TEST_CASE("compressor: what cannot be is refused by name, and changes nothing") {
  using Catch::Contains;
  model_cache kv(64);
  const auto refused = [](auto make, const char* words) {
    CHECK_THROWS_WITH(make(), Contains(words));
  };
  const auto made = [&](const char* policy, const budget& b,
                        kvmeld::observation_needs given = {true, true, true}) {
    return [&kv, policy, b, given] {
      kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(policy), b,
                              given);
    };
  };
  refused(made("h2o", {.slots = 64}), "a capacity of at least 65");
  refused(made("h2o", {.slots = 60, .trigger = 0, .slack = 4}), "a capacity of at least 65");
  refused(made("h2o", {.slots = 2}), "a budget of at least");
  refused(made("streaming_llm", budget::shared(32)), "a score per slot");
  refused(made("h2o", {.slots = 32}, {.query = true}), "the step's probabilities (h2o needs it)");
  refused(made("keepkv", {.slots = 32}, {.probabilities = true, .query = true}),
          "the step's log_sum_exp (keepkv needs it)");
  made("key_diff", {.slots = 32}, {})();

  kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>("h2o"),
                          budget{.slots = 32});
  const prompt_rows prompt(40);
  const auto heads = model_cache::of(0, 0);
  prompt.append(kv, 0, 0, 0, 40);
  const auto q = prompt.queries(0, 0, 40);
  refused([&] { kvmeld::queries(q.first(q.size() - 1), 40, layer_spec); }, "[40, 4, 16]");
  refused(
      [&] {
        meld.prompt(kvmeld::head_range{0, 1}, kvmeld::queries(q, 40, layer_spec));
      },
      "queries of 1 KV heads, got 2");
  refused([&] { meld.prompt(model_cache::of(1, 0), kvmeld::queries(q, 40, layer_spec)); },
          "at most 0 queries");
  refused(
      [&] {
        meld.prompt(kvmeld::head_range{1, 2}, kvmeld::queries(q, 40, layer_spec));
      },
      "heads of one layer and request, got heads 1 and 2");
  refused([&] { meld.prompt(kvmeld::head_range{7, 2}, kvmeld::queries(q, 40, layer_spec)); }, "7");
  refused([&] { meld.end_prompt(2); }, "a request of 0 to 1, got 2");
  refused([&] { meld.end_prompt(0); }, "as many tokens in every head, got 40 in head 0 and 0 in");
  prompt.append(kv, 0, 1, 0, 40), prompt.append(kv, 1, 1, 0, 40);
  refused([&] { meld.end_prompt(1); }, "expected the prompt's queries");
  meld.clear(1);
  CHECK(kv.head(0).length() == 40);
  meld.prompt(heads, kvmeld::queries(q, 40, layer_spec));
  std::vector<float> out(kv_heads_of * group * dim), row(kv_heads_of * dim);
  const std::vector<float> query(out.size());
  refused([&] { meld.step(heads, {query, row, row}, out); }, "end_prompt first");
  meld.compress(heads);
  CHECK(kv.head(0).length() == 32);
  refused([&] { meld.step(heads, {row, row, row}, out); }, "expected q");
  refused([&] { meld.step(std::vector<index_t>{0, 0}, {query, row, row}, out); }, "twice");
  refused([&] { meld.accept(0, 1); }, "expected a draft");
  refused([&] { meld.copy(0, 5); }, "a request of 0 to 1, got 5");
  meld.step(heads, {query, row, row}, out);
  CHECK(kv.head(0).next_position() == 41);
}

}  // namespace compressor_prompt_test
