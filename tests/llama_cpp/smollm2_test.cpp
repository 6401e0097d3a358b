// SPDX-License-Identifier: MIT
// SmolLM2 among other sequences, in drafts and loaded again: it writes what it writes alone.
#include <catch2/catch.hpp>
#include <sstream>

#include "llama_cpp/announced.hpp"
#include "llama_cpp/bundled.hpp"
#include "llama_cpp/look_up.hpp"

namespace smollm2_test {

using namespace test;

constexpr index_t prompt = 192, written = 32, layers = 30, kv_heads = 3;

int likeliest(const engine::row_major_matrix& logits, Eigen::Index row) {
  Eigen::Index best = 0;
  logits.row(row).maxCoeff(&best);
  return static_cast<int>(best);
}

/// Reads a text's prompt, and appends the token after it.
void read(announced_llama& kv, std::vector<int>& text, llama_seq_id sequence = 0) {
  for (index_t at = 0; at < prompt; at += 64) {
    const auto logits = kv.decode(tokens_of(text, at, 64, sequence));
    if (at + 64 == prompt) {
      text.push_back(likeliest(logits, 63));
    }
  }
}

token_at last_of(const std::vector<int>& text, llama_seq_id sequence = 0) {
  return {sequence, static_cast<index_t>(text.size()) - 1, text.back()};
}

/// Writes on until the text has `length` tokens.
void write(announced_llama& kv, std::vector<int>& text, index_t length, llama_seq_id sequence = 0) {
  while (static_cast<index_t>(text.size()) < length) {
    text.push_back(likeliest(kv.decode(std::vector{last_of(text, sequence)}), 0));
  }
}

bool same_heads(announced_llama& a, announced_llama& b, index_t of_b) {
  bool same = true;
  for (index_t l = 0; l < layers; ++l) {
    for (index_t h = 0; h < kv_heads; ++h) {
      same = same && a.positions(l, h) == b.positions(l, h, of_b);
    }
  }
  return same;
}

TEST_CASE("llama.cpp: SmolLM2 writes the same beside a sequence, in drafts and loaded again") {
  const auto file = paths::source("build/models/SmolLM2-135M-Instruct.Q4_1.gguf");
  if (!std::filesystem::exists(file)) {
    WARN("not fetched: bash examples/run --model smollm2");
    return;
  }
  const auto model = load_gguf(file);
  const auto first = [&](const std::string& text) {
    std::vector<int> tokens(text.size());
    REQUIRE(llama_tokenize(llama_model_get_vocab(model.get()), text.data(),
                           static_cast<int>(text.size()), tokens.data(),
                           static_cast<int>(tokens.size()), true, false) >= prompt);
    tokens.resize(prompt);
    return tokens;
  };
  std::string list;
  for (int i = 0; i < 60; ++i) {
    list += "apple, pear, plum, cherry, fig\n";
  }
  constexpr index_t length = prompt + written;
  for (const std::string name : {"h2o", "fold"}) {
    CAPTURE(name);
    const kvmeld::llama::options o{.how = mode::own_attention,
                                   .limits = {{.slots = 96, .trigger = 128}}};
    const auto made = [&] {
      return std::make_unique<announced_llama>(model.get(), policy_named(name), o,
                                               parameters_for(2));
    };
    const auto alone = made(), beside = made(), drafted = made(), saved = made(), loaded = made();
    std::vector<int> text = first(list), other = first(bundled::text()), again = text,
                     guessed = text, half = text;
    read(*alone, text), write(*alone, text, length);

    read(*beside, other), read(*beside, again, 1);
    while (static_cast<index_t>(again.size()) < length) {
      const auto logits = beside->decode(std::vector{last_of(other), last_of(again, 1)});
      other.push_back(likeliest(logits, 0)), again.push_back(likeliest(logits, 1));
    }
    CHECK(again == text);
    CHECK(same_heads(*alone, *beside, 1));

    index_t passes = 0;
    read(*drafted, guessed);
    for (; static_cast<index_t>(guessed.size()) < length; ++passes) {
      const auto at = static_cast<index_t>(guessed.size());
      std::vector<int> tokens = {guessed.back()};
      const auto more =
          look_up(guessed, std::min({index_t{7}, drafted->kv.draft_room() - 1, length - at - 1}));
      tokens.insert(tokens.end(), more.begin(), more.end());
      std::vector<token_at> batch;
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        batch.push_back({0, at - 1 + static_cast<index_t>(i), tokens[i]});
      }
      const auto logits = drafted->decode(batch, true);
      std::size_t kept = 0;
      do {
        guessed.push_back(likeliest(logits, static_cast<Eigen::Index>(kept++)));
      } while (kept < tokens.size() && tokens[kept] == guessed.back());
      llama_memory_seq_rm(drafted->memory(), 0, static_cast<index_t>(guessed.size()) - 1, -1);
      drafted->kv.accept();
    }
    CHECK(guessed == text);
    CHECK(same_heads(*alone, *drafted, 0));
    CHECK(passes < written / 2);

    read(*saved, half), write(*saved, half, prompt + written / 2);
    std::stringstream bytes;
    saved->kv.save(bytes);
    loaded->kv.load(bytes, 1);
    write(*loaded, half, length, 1);
    CHECK(half == text);
    CHECK(same_heads(*alone, *loaded, 1));
  }
}

}  // namespace smollm2_test
