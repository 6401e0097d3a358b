// SPDX-License-Identifier: MIT
/// Prompts that all policies and budgets share, and what each keeps of them.
#include "evaluate/prompt.hpp"

#include <catch2/catch.hpp>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/policies.hpp"
#include "support/tiny_model.hpp"

namespace prompt_test {

using test::tiny_model;

std::vector<int> first_tokens(const tiny_model& files, std::size_t count) {
  std::vector<int> tokens;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, count)) {
    tokens.push_back(c);
  }
  return tokens;
}

TEST_CASE("prompts measured once are compressed as by compress itself, at any budget") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto tokens = first_tokens(files, 96);
  const auto r = engine::prefill(model, tokens);
  const auto policies = evaluate::all_policies();
  // Shared up to token 70, as needle prompts are.
  const auto body = std::make_shared<evaluate::prompt_body>(model.shape(), r, 70, 100);
  const auto again = evaluate::replay_for(policies, model, r, tokens);
  const auto prompt = evaluate::measure(model.shape(), r, policies, body, again);
  for (std::size_t i = 0; i < policies.size(); ++i) {
    CAPTURE(policies[i].name);
    if (policies[i].budgets == evaluate::budget_allocation::duo_attention ||
        policies[i].budgets == evaluate::budget_allocation::global) {
      continue;  // a head that keeps all, or what was observed before, is no matter of compress
    }
    for (const kvmeld::budget limit : {kvmeld::budget{40}, kvmeld::budget{60}}) {
      const evaluate::contender chosen{i, policies[i].policy, limit, policies[i].budgets};
      auto whole = prompt.cache();
      const auto slots = evaluate::allocate_slots(chosen, whole, prompt.measured[i].heads);
      CHECK(slots[0] + slots[1] == limit.slots * 2);  // what was asked for
      CHECK(std::ranges::min(slots) >= kvmeld::declared(policies[i].policy).min_budget());
      const evaluate::compressed_cache ours(chosen, prompt);
      auto kv = prompt.cache();
      std::size_t bytes = 0;
      for (const kvmeld::index_t h : {0, 1}) {
        const auto l = static_cast<std::size_t>(h);
        auto state = kvmeld::make_head_state(policies[i].policy, kv.head(h));
        kvmeld::workspace work;
        work.reserve(kv.head(h));
        const auto own = evaluate::queries_of(model.shape(), r.layers[l].q);
        const auto reference =
            evaluate::measure(policies[i], model.shape(), r, again, 100).chosen[l];
        const auto queries = reference ? reference->view() : own;
        kvmeld::observe(policies[i].policy, kv.head(h), state, queries);
        kvmeld::compress(policies[i].policy, kv.head(h), state, work, kvmeld::budget{slots[l]},
                         queries);
        bytes += kvmeld::declared(policies[i].policy).supports_decode() ? state.bytes() : 0;
        const auto head = kv.head(h);
        const auto same = ours.kv().head(h);
        REQUIRE(same.length() == head.length());
        for (kvmeld::index_t s = 0; s < head.length(); ++s) {
          CHECK(same.position(s) == head.position(s));
          CHECK(same.log_mass(s) == head.log_mass(s));
          CHECK(same.key(s)[0] == head.key(s)[0]);
        }
      }
      CHECK(ours.bytes() == kv.bytes() + bytes);
    }
  }
}

TEST_CASE("D2O's exempt layers keep all, the others what they had") {
  kvmeld::cache kv({.kv_heads = 1, .group = 1, .key_dim = 2}, {.layers = 5, .capacity = 90});
  std::vector<kvmeld::head_state> measured;
  for (int head = 0; head < 5; ++head) {
    kv.append(kv.heads(head, 0), std::vector<float>(180), std::vector<float>(180), 90);
    measured.emplace_back(kvmeld::slot_stats_of(kvmeld::d2o{}), 0, 90, "d2o");
    measured.back().extend(90);
    measured.back().column(0)[0] = static_cast<float>(head);
  }
  evaluate::contender c{.policy = kvmeld::d2o{}, .limit = {30}};
  c.budgets = evaluate::budget_allocation::d2o_exempt;
  const auto slots = evaluate::allocate_slots(c, kv, measured);
  CHECK(slots[0] == 90);
  CHECK(slots[1] == 90);
  CHECK(slots[4] == 90);
  CHECK(slots[2] + slots[3] == 60);
  CHECK(evaluate::detail::parse_policy("d2o+d2o_exempt").budgets == c.budgets);
}

TEST_CASE("what shares a budget is what a compressor makes of it") {
  const std::string name = GENERATE("fold", "kvmerger", "h2o+union", "scissorhands+global");
  const tiny_model files(2);
  const auto model = engine::decoder::load(files.file(""));
  const auto tokens = first_tokens(files, 96);
  const auto r = engine::prefill(model, tokens);
  const std::vector<evaluate::named_policy> policies = {evaluate::detail::parse_policy(name)};
  const auto prompt =
      evaluate::measure(model.shape(), r, policies,
                        std::make_shared<evaluate::prompt_body>(model.shape(), r, 96, 140));
  evaluate::contender chosen{
      .policy = policies[0].measuring(), .limit = {30}, .budgets = policies[0].budgets};
  chosen.policy = kvmeld::for_shared(chosen.policy, 30, 0);
  const evaluate::compressed_cache ours(chosen, prompt);

  kvmeld::cache kv(model.shape().attention(0), {.layers = 2, .capacity = 140});
  kvmeld::compressor meld(
      kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name.substr(0, name.find('+'))),
      name == "h2o+union" ? kvmeld::budget::same_tokens(30) : kvmeld::budget::shared(30));
  for (kvmeld::index_t l = 0; l < 2; ++l) {
    const auto& layer = r.layers[static_cast<std::size_t>(l)];
    evaluate::append(kv, l, layer, 0, 96);
    const std::span q(layer.q.data(), static_cast<std::size_t>(layer.q.size()));
    meld.prompt(kv.heads(l, 0), kvmeld::queries(q, 96, kv.spec()));
  }
  meld.end_prompt(0);
  for (kvmeld::index_t h = 0; h < 4; ++h) {
    const auto a = kv.head(h), b = ours.kv().head(h);
    REQUIRE(a.length() == b.length());
    CHECK(meld.limit(h).slots == ours.meld().limit(h).slots);
    CHECK(meld.limit(h).trigger == ours.meld().limit(h).trigger);
    for (kvmeld::index_t s = 0; s < a.length(); ++s) {
      CHECK(a.position(s) == b.position(s));
      CHECK(a.log_mass(s) == Approx(b.log_mass(s)).margin(1e-4));
      for (kvmeld::index_t i = 0; i < 8; ++i) {
        CHECK(double{a.key(s)[i]} == Approx(double{b.key(s)[i]}).margin(1e-4));
        CHECK(double{a.value(s)[i]} == Approx(double{b.value(s)[i]}).margin(1e-4));
      }
    }
  }
}

TEST_CASE("a replay is words and the prompt read again right behind it, part by part") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto tokens = first_tokens(files, 300);
  const auto r = engine::prefill(model, tokens);
  const evaluate::replay_words words{.whole = {1, 2, 3}, .part = {4, 5}, .end = {6}};
  const auto again = evaluate::replay(model, r, tokens, words, 256);
  CHECK(again.parts == std::vector<kvmeld::index_t>{4 + 256, 2 + 8 + 1 + 44});
  REQUIRE(again.positions.size() == 260 + 55);
  CHECK(again.positions[0] == 300);
  CHECK(again.positions[259] == 559);
  CHECK(again.positions[260] == 300);  // the second part begins there too
  const auto whole = [&](std::vector<int> before, int first) {
    auto both = tokens;
    both.insert(both.end(), before.begin(), before.end());
    both.insert(both.end(), tokens.begin() + first, tokens.begin() + std::min(300, first + 256));
    return engine::prefill(model, both);
  };
  std::vector<int> second = {4, 5};
  second.insert(second.end(), tokens.begin() + 248, tokens.begin() + 256);
  second.push_back(6);
  for (const auto& [read, first, rows] :
       {std::tuple{whole({1, 2, 3, 6}, 0), 0, 260}, {whole(second, 256), 260, 55}}) {
    for (std::size_t l = 0; l < read.layers.size(); ++l) {
      for (const auto part :
           {&engine::layer_record::q, &engine::layer_record::k, &engine::layer_record::v}) {
        const auto ours = (again.layers[l].*part).middleRows(first, rows);
        CHECK(ours.isApprox((read.layers[l].*part).bottomRows(rows), 1e-4F));
      }
    }
  }
  const evaluate::named_policy chosen{.name = "h2o",
                                      .policy = kvmeld::h2o{},
                                      .queries = evaluate::query_source::replay,
                                      .queries_taken = 315};
  const evaluate::second_readings both{.repeated = {}, .behind = again};
  const auto reference = evaluate::measure(chosen, model.shape(), r, both, 300).chosen[0];
  REQUIRE(reference->count() == 315);
  CHECK(reference->view().position[314] == 300 + 54);
  CHECK(reference->view().at(1, 314)[0] == again.layers[0].q(314, model.shape().dim));
  auto chat = words;  // the beginning of a turn is not repeated, where a prompt has it
  chat.skipped = {tokens[0], tokens[1]};
  CHECK(evaluate::replay(model, r, tokens, chat, 300).parts ==
        std::vector<kvmeld::index_t>{4 + 298});
  chat.skipped = {tokens[0] + 1};
  CHECK(evaluate::replay(model, r, tokens, chat, 300).parts ==
        std::vector<kvmeld::index_t>{4 + 300});
  CHECK(evaluate::replay(model, r, tokens, {}, 256).parts == std::vector<kvmeld::index_t>{256, 44});
}

TEST_CASE("heads that retrieve keep all, the others what is left, in the prompt and after it") {
  CHECK(evaluate::whole_heads(16, 90, 896, 5) == 1);   // 544 slots for 15 heads
  CHECK(evaluate::whole_heads(16, 179, 896, 5) == 2);  // 1072 for 14
  CHECK(evaluate::whole_heads(16, 45, 896, 5) == 0);
  CHECK(evaluate::whole_heads(16, 90, 896, 40) == 0);  // 36 are too few
  CHECK(evaluate::whole_heads(16, 896, 896, 5) == 15);

  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto tokens = first_tokens(files, 96);
  const auto r = engine::prefill(model, tokens);
  const std::vector<evaluate::named_policy> policies = {
      {.name = "duo",
       .policy = kvmeld::streaming_llm{},
       .budgets = evaluate::budget_allocation::duo_attention}};
  const auto prompt =
      evaluate::measure(model.shape(), r, policies,
                        std::make_shared<evaluate::prompt_body>(model.shape(), r, 96, 140));
  const evaluate::contender chosen{
      .policy = policies[0].policy, .limit = {60}, .budgets = policies[0].budgets, .whole = {0, 1}};
  const evaluate::compressed_cache cache(chosen, prompt);
  CHECK(cache.kv().head(0).length() == 24);
  CHECK(cache.kv().head(1).length() == 96);
  std::vector<float> q(16, 0.5F), k(8, 0.5F), v(8, 0.5F), out(16);
  for (int t = 0; t < 40; ++t) {
    for (const kvmeld::index_t layer : {0, 1}) {
      cache.meld().step(cache.kv().heads(layer, 0), {q, k, v}, out);
    }
  }
  CHECK(cache.kv().head(0).length() == 24);
  CHECK(cache.kv().head(1).length() == 136);
}

TEST_CASE("one threshold over the model divides all its slots, by the scores that heads share") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto r = engine::prefill(model, first_tokens(files, 96));
  kvmeld::fold by_scores;
  by_scores.pins = kvmeld::fold::pin_rule::scores;
  const std::vector<evaluate::named_policy> policies = {
      {.name = "h2o", .policy = kvmeld::h2o{.recent = 0.1F}},
      {.name = "fold", .policy = by_scores, .queries = evaluate::query_source::lookahead}};
  const auto prompt =
      evaluate::measure(model.shape(), r, policies,
                        std::make_shared<evaluate::prompt_body>(model.shape(), r, 96, 140));
  for (std::size_t i = 0; i < policies.size(); ++i) {
    INFO(policies[i].name);
    evaluate::contender chosen{.index = i,
                               .policy = policies[i].policy,
                               .limit = {30},
                               .budgets = evaluate::budget_allocation::global};
    chosen.policy = kvmeld::for_shared(chosen.policy, 30, 0);
    const evaluate::compressed_cache cache(chosen, prompt);
    kvmeld::index_t all = 0;
    for (const kvmeld::index_t h : {0, 1}) {
      all += cache.kv().head(h).length();
      CHECK(cache.kv().head(h).length() >= kvmeld::declared(chosen.policy).min_budget());
    }
    CHECK(all == 2 * 30);
  }
}

TEST_CASE("decoding from an empty cache that evicts nothing is reading the prompt") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto tokens = first_tokens(files, 80);
  const auto expected = engine::prefill(model, tokens).logits;
  for (const evaluate::any_policy& policy :
       {evaluate::full_cache(), evaluate::any_policy(kvmeld::h2o{})}) {
    evaluate::compressed_decoder decoder(model, {.policy = policy, .limit = {90}}, 80);
    const evaluate::row_major_matrix* logits = nullptr;
    for (const int token : tokens) {
      logits = &decoder.next(token);
    }
    CHECK(logits->isApprox(expected, 1e-4F));
  }
}

TEST_CASE("sequences decoded side by side, of different lengths, are those decoded alone") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto tokens = first_tokens(files, 60);
  const evaluate::contender chosen{.policy = kvmeld::h2o{}, .limit = {20}};
  const auto from = [&](std::size_t first) {
    evaluate::compressed_decoder decoder(model, chosen, 80);
    for (std::size_t t = first; t < 50; ++t) {
      decoder.next(tokens[t]);
    }
    return decoder;
  };
  std::vector<evaluate::compressed_decoder> alone = {from(0), from(5), from(45)}, abreast = alone;
  std::vector<evaluate::compressed_decoder*> all = {&abreast[0], &abreast[1], &abreast[2]};
  engine::decoder::scratch work;
  evaluate::row_major_matrix logits;
  for (std::size_t t = 50; t < 57; ++t) {
    const std::vector<int> next = {tokens[t], tokens[t + 1], tokens[t + 2]};
    evaluate::compressed_decoder::next(all, next, work, logits);
    for (Eigen::Index i = 0; i < 3; ++i) {
      const auto own = alone[static_cast<std::size_t>(i)].next(next[static_cast<std::size_t>(i)]);
      CHECK(logits.row(i).isApprox(own.row(0), 1e-4F));
    }
  }
}

}  // namespace prompt_test
