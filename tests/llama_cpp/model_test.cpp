// SPDX-License-Identifier: MIT
// The bundled model as GGUF: llama.cpp tokenises and predicts as our engine does.
#include <catch2/catch.hpp>

#include "llama_cpp/bundled.hpp"
#include "llama_cpp/streams.hpp"

namespace model_test {

using namespace test;

std::vector<int> tokenize(const llama_model* model, const std::string& text) {
  std::vector<int> tokens(text.size() + 8);
  const int n =
      llama_tokenize(llama_model_get_vocab(model), text.data(), static_cast<int>(text.size()),
                     tokens.data(), static_cast<int>(tokens.size()), false, false);
  REQUIRE(n > 0);
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

TEST_CASE("llama.cpp: the bundled model's text becomes the same tokens") {
  const bundled m;
  REQUIRE(m.theirs != nullptr);
  const std::string text = m.text();
  // Line by line: SentencePiece takes a text from its beginning otherwise than within one.
  std::size_t lines = 0, same = 0;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line); ++lines) {
    same += line.empty() || tokenize(m.theirs.get(), line) == m.tokens.encode(line) ? 1 : 0;
  }
  CHECK(lines > 1900);
  CHECK(same == lines);
  CHECK(tokenize(m.theirs.get(), text) == m.tokens.encode(text));
}

TEST_CASE("llama.cpp: the bundled model's logits are those of our engine") {
  const bundled m;
  const auto tokens = m.tokens.encode(m.text().substr(0, 3000));
  constexpr index_t count =
      512;  // behind them the angles of both engines' rotations differ by more
  const auto part = std::span(tokens).first(count);
  auto parameters = exact_parameters(count, 256);
  parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const llama_context_ptr context(llama_init_from_model(m.theirs.get(), parameters));
  const auto ours = full_logits(m.ours, part);
  float most = 0;
  for (index_t at = 0; at < count; at += 256) {
    const auto theirs = decode(context.get(), part.subspan(static_cast<std::size_t>(at), 256), at);
    most = std::max(most, difference(theirs, ours.middleRows(at, 256)));
  }
  CAPTURE(most);
  CHECK(most < 1e-4F);
  CHECK(ours.cwiseAbs().maxCoeff() > 5);
}

TEST_CASE("llama.cpp: on the bundled model every policy gives the logits of our own engine") {
  const bundled m;
  const both_engines both{m.ours, m.theirs.get()},
      as_theirs{m.ours, m.theirs.get(), angles::llama_cpp};
  const auto tokens = m.tokens.encode(m.text().substr(0, 6000));
  const auto text = std::span(tokens).first(2048);
  const stream_logits whole[] = {both.whole(text, false), both.whole(text, true)};
  // What the angles of the rotations alone make: all of the difference but a 20th.
  const float ours = apart(both.our_whole(text, true), whole[1]),
              turned_alike = apart(as_theirs.our_whole(text, true), whole[1]);
  CAPTURE(ours, turned_alike);
  CHECK(ours < 1e-3F);
  CHECK(turned_alike < 1e-4F);
  for (const std::string& name : every_policy_name()) {
    const auto p = policy_named(name);
    const auto d =
        as_theirs.compressed(p, text, whole[kvmeld::declared(p).supports_decode() ? 1 : 0]);
    CAPTURE(name, d.effect, d.to_repack, d.to_own, d.modes);
    CHECK(d.modes < 1e-3F);
    CHECK(d.effect > 1000 * d.modes);
    // A token's keys in the first layer have one norm, and one leverage before the rotation,
    // wherever it stands in the text: which of them leaves, every engine's rounding decides.
    if (p.name() == "fold" || p.name() == "compactor" || p.name() == "lowest_norm") {
      continue;
    }
    CHECK(d.to_repack < 1e-3F);
    CHECK(d.to_own < 1e-3F);
    CHECK(d.effect > 1000 * std::max(d.to_repack, d.to_own));
  }
}

}  // namespace model_test
