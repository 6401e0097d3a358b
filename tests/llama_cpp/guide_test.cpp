// SPDX-License-Identifier: MIT
// What docs/how-to/llama-cpp.md shows, which tests/guide_test.cpp compares with this file.
#include <catch2/catch.hpp>
#include <sstream>

#include "llama_cpp/announced.hpp"

namespace llama_guide_test {

using namespace test;

TEST_CASE("llama.cpp: the guide's program holds a prompt in its budget and goes on") {
  const llama_model_ptr bundled = load_gguf(paths::gguf());
  llama_model* const model = bundled.get();
  auto text = draw_tokens(801, llama_vocab_n_tokens(llama_model_get_vocab(model)));
  llama_context_params params = exact_parameters(1024, 1024);
  const llama_batch batch = llama_batch_get_one(text.data(), 800),
                    token = llama_batch_get_one(text.data() + 800, 1);

  // clang-format off
  kvmeld::llama::options options{.how = kvmeld::llama::mode::own_attention,
                                 .limits = {kvmeld::budget::shared(480)}};
  kvmeld::llama::compressor kv(model, kvmeld::any_policy(kvmeld::fold{}), options);
  kv.attach(params);                       // llama_context_params, before the context
  llama_context* ctx = llama_init_from_model(model, params);
  kv.bind(ctx);

  llama_decode(ctx, batch);                // the prompt, in any number of batches
  kv.check();                              // throws the error of that call, if any
  kv.end_prompt();                         // divides the shared budget, and compresses
  llama_decode(ctx, token), kv.check();    // one token at a time
  kv.report();                             // tokens, cells, slots, bytes, seconds
  // clang-format on

  const llama_context_ptr context(ctx);
  CHECK(kv.report().tokens == 801);
  CHECK(kv.slots() == 480);
  index_t held = 0, heads = 0;
  for (index_t l = 0; l < llama_model_n_layer(model); ++l) {
    for (index_t h = 0; h < llama_model_n_head_kv(model); ++h) {
      held += kv.held().head(l, h).length(), ++heads;
    }
  }
  CHECK(held <= 480 * heads);
  CHECK(held > 400 * heads);
}

TEST_CASE("llama.cpp: the guide's draft, copy and saved sequence are the sequence") {
  const twin models;
  const auto text = draw_tokens(80, models.shape.vocab);
  announced_llama both(models.theirs.get(), policy_named("h2o"),
                       {.how = mode::own_attention, .limits = {{.slots = 48, .trigger = 60}}},
                       parameters_for(3));
  auto& kv = both.kv;
  both.decode(tokens_of(text, 0, 64));
  llama_context* const ctx = both.context.get();
  const llama_memory_t memory = both.memory();
  const llama_seq_id seq = 0;
  const llama_pos first_wrong = 66;
  std::vector<int> draft(text.begin() + 64, text.begin() + 68);
  const llama_batch batch = llama_batch_get_one(draft.data(), 4);
  std::stringstream file;

  // clang-format off
  kv.announce(batch, true);                // whose tokens it has; true: a draft
  llama_decode(ctx, batch), kv.check();
  llama_memory_seq_rm(memory, seq, first_wrong, -1);
  kv.accept();                             // the draft's other tokens count, as single steps
  kv.copy(0, 1);                           // instead of llama_memory_seq_cp
  kv.save(file, 0), kv.load(file, 2);      // with the engine's own state of the sequence
  // clang-format on

  CHECK(both.positions(1, 0, 0).back() == 65);
  std::vector<token_at> next;
  for (llama_seq_id s = 0; s < 3; ++s) {
    CHECK(both.positions(1, 0, s) == both.positions(1, 0, 0));
    next.push_back({s, 66, text[66]});
  }
  const auto logits = both.decode(next);
  CHECK(difference(logits.row(1), logits.row(0)) < 1e-4F);
  CHECK(difference(logits.row(2), logits.row(0)) < 1e-4F);
}

}  // namespace llama_guide_test
