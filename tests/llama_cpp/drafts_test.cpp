// SPDX-License-Identifier: MIT
// Drafts: tokens decoded together, of which some are taken back, are as the steps that stay.
#include <catch2/catch.hpp>

#include "llama_cpp/announced.hpp"

namespace drafts_test {

using namespace test;
using Catch::Contains;

constexpr index_t prompt = 128, written = 60;

/// The same text in steps and in drafts, each with `wrong` tokens after the true ones, which
/// `llama_memory_seq_rm` takes back.
void compare(llama_model* model, const std::string& policy, index_t layers, index_t vocab,
             const std::vector<index_t>& untouched, float tolerance,
             const std::string& rows = "float32") {
  const auto text = draw_tokens(prompt + written, vocab), wrong = draw_tokens(60, vocab, 11);
  const kvmeld::llama::options o{.how = mode::own_attention,
                                 .limits = {{.slots = 48, .trigger = 60}},
                                 .untouched = untouched,
                                 .rows = kvmeld::make_storage(rows)};
  announced_llama plain(model, policy_named(policy), o, parameters_for(1)),
      drafted(model, policy_named(policy), o, parameters_for(1));
  for (index_t at = 0; at < prompt; at += 64) {
    plain.decode(tokens_of(text, at, 64)), drafted.decode(tokens_of(text, at, 64));
  }
  float most = 0, size = 0;
  index_t longest = 0;
  for (index_t at = prompt, i = 0; at < prompt + written; ++i) {
    const bool open = i % 3 == 1;  // the last draft was not accepted: this one's position says it
    const index_t room = open ? 1 : drafted.kv.draft_room(),
                  kept = std::min({i % 5 + 1, room, prompt + written - at});
    longest = std::max(longest, kept);
    auto tokens = tokens_of(text, at, kept);
    for (index_t w = 0; w < i % 4; ++w) {
      tokens.push_back({0, at + kept + w, wrong[static_cast<std::size_t>(3 * (i % 20) + w)]});
    }
    const auto before = drafted.positions(layers - 1, 0);
    const auto logits = drafted.decode(tokens, true);
    CHECK((open || drafted.positions(layers - 1, 0) == before));
    llama_memory_seq_rm(drafted.memory(), 0, at + kept, -1);
    if (i % 3 > 0) {
      drafted.kv.accept();
    }
    for (index_t t = 0; t < kept; ++t) {
      const auto wanted = plain.decode(tokens_of(text, at + t, 1));
      most = std::max(most, difference(logits.row(t), wanted));
      size = std::max(size, wanted.cwiseAbs().maxCoeff());
    }
    at += kept;
  }
  drafted.kv.accept();
  CAPTURE(most, size);
  CHECK(most < tolerance * size);
  CHECK(longest == 5);
  for (index_t l = 0; l < layers; ++l) {
    for (index_t h = 0; plain.kv.held().holds(l) && h < 2; ++h) {
      CHECK(drafted.positions(l, h) == plain.positions(l, h));
    }
  }
  const auto a = plain.kv.report(), b = drafted.kv.report();
  CHECK((b.tokens == prompt + written && b.bytes == a.bytes && b.cells == a.cells));
}

TEST_CASE("llama.cpp: drafts with tokens taken back are the steps that stay, for every policy") {
  const twin models;
  for (const std::string& name : every_decoding_policy()) {
    CAPTURE(name);
    compare(models.theirs.get(), name, 2, models.shape.vocab, {}, 1e-4F);
  }
  compare(models.theirs.get(), "h2o", 2, models.shape.vocab, {0}, 1e-4F);
  // Rows age while a draft is open, and must not have where its tokens are taken back. The engine's
  // own keys differ in their last bits between one token and several, so some codes do.
  compare(models.theirs.get(), "h2o", 2, models.shape.vocab, {0}, 1e-3F, "k4v4:newest=3");
}

TEST_CASE("llama.cpp: drafts of every family are the steps that stay") {
  for (const family& f : families()) {
    CAPTURE(f.arch, f.scaling);
    const auto model = random_model(f);
    compare(model.get(), "h2o", family::layers, family::vocab, {}, f.window > 0 ? 1e-2F : 1e-4F);
  }
}

TEST_CASE("llama.cpp: of two sequences that draft in one batch each takes back its own") {
  const twin models;
  const auto text = draw_tokens(90, models.shape.vocab);
  const kvmeld::llama::options o{.how = mode::own_attention,
                                 .limits = {{.slots = 48, .trigger = 60}}};
  announced_llama both(models.theirs.get(), policy_named("h2o"), o, parameters_for(2)),
      one(models.theirs.get(), policy_named("h2o"), o, parameters_for(1));
  both.decode(tokens_of(text, 0, 64)), one.decode(tokens_of(text, 0, 64));
  auto mixed = tokens_of(text, 64, 3);
  for (const token_at& t : tokens_of(text, 0, 4, 1)) {
    mixed.push_back(t);
  }
  both.decode(mixed, true);
  llama_memory_seq_rm(both.memory(), 0, 66, -1);
  llama_memory_seq_rm(both.memory(), 1, 0, -1);  // all of it
  CHECK_THROWS_WITH(both.kv.end_prompt(2), Contains("end_prompt: expected a sequence of 0 to 1"));
  both.kv.accept();
  CHECK(both.kv.report().tokens == 66);
  one.decode(tokens_of(text, 64, 1)), one.decode(tokens_of(text, 65, 1));
  CHECK(both.positions(1, 1) == one.positions(1, 1));
  CHECK(difference(both.decode(tokens_of(text, 66, 1)), one.decode(tokens_of(text, 66, 1))) <
        1e-4F);
}

TEST_CASE("llama.cpp: another sequence goes on while a draft waits, and all drafts end or none") {
  const twin models;
  const auto text = draw_tokens(90, models.shape.vocab);
  const kvmeld::llama::options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
  announced_llama kv(models.theirs.get(), policy_named("full_cache"), o, parameters_for(2));
  kv.decode(tokens_of(text, 0, 20)), kv.decode(tokens_of(text, 0, 20, 1));
  kv.decode(tokens_of(text, 20, 4), true);
  llama_memory_seq_rm(kv.memory(), 0, 22, -1);
  kv.decode(tokens_of(text, 20, 1, 1));  // check() lets the first's draft wait
  kv.decode(tokens_of(text, 21, 2, 1), true), kv.decode(tokens_of(text, 23, 2, 1), true);
  // Of the second one a token before its draft goes too: the first one's is not decided either.
  llama_memory_seq_rm(kv.memory(), 1, 22, -1);
  const auto before = kv.kv.report();
  CHECK_THROWS_WITH(kv.kv.accept(), Contains("accept: expected 23 to 25 tokens in the engine"));
  CHECK((kv.kv.report().tokens == before.tokens && kv.kv.report().bytes == before.bytes));
  CHECK_THROWS_WITH(kv.kv.copy(0, 1), Contains("copy: expected accept first"));
}

TEST_CASE("llama.cpp: what is no draft is not taken back, and a draft waits for its prompt's end") {
  const twin models;
  const auto text = draw_tokens(90, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(models.theirs.get(), policy_named("h2o"),
                        {.how = how, .limits = {{.slots = 48}}}, exact_parameters(256, 64));
    kv.decode(std::span(text).first(64)), kv.decode(std::span(text).subspan(64, 1));
    const auto before = kv.kv.report();
    llama_memory_seq_rm(llama_get_memory(kv.context.get()), 0, 64, -1);
    int code = 0;
    decode(kv.context.get(), tokens_of(text, 64, 1), &code);
    CHECK(code == (how == mode::repack ? -1 : 2));  // repack has positions 0 to 46
    CHECK_THROWS_WITH(kv.kv.check(), Contains("a draft's tokens alone can be taken back"));
    CHECK((kv.kv.report().tokens == 65 && kv.kv.report().bytes == before.bytes));
  }
  kvmeld::llama::options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
  announced_llama full(models.theirs.get(), policy_named("h2o"), o, parameters_for(1));
  full.decode(tokens_of(text, 0, 64));
  CHECK(full.kv.draft_room() == 1);
  // Tokens before the draft are gone with it.
  announced_llama drafted(models.theirs.get(), policy_named("full_cache"), o, parameters_for(1));
  drafted.decode(tokens_of(text, 0, 2), true);
  drafted.decode(tokens_of(text, 2, 2), true);
  CHECK(drafted.kv.report().tokens == 4);
  llama_memory_seq_rm(drafted.memory(), 0, 1, -1);
  CHECK_THROWS_WITH(drafted.kv.accept(), Contains("accept: expected 2 to 4 tokens in the engine"));
  o.limits = {kvmeld::budget::shared(24)};
  announced_llama open(models.theirs.get(), policy_named("fold"), o, parameters_for(1));
  open.decode(tokens_of(text, 0, 30));
  CHECK_THROWS_WITH(open.decode(tokens_of(text, 30, 2), true),
                    Contains("announce: expected end_prompt first, got a draft"));
  open.kv.end_prompt();
  open.decode(tokens_of(text, 30, 2), true);
}

}  // namespace drafts_test
