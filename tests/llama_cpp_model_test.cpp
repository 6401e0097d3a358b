// The bundled model as GGUF: llama.cpp tokenises and predicts as our engine does.
#include <catch2/catch.hpp>

#include "engine/tokenizer.hpp"
#include "support/llama_files.hpp"

namespace {

using namespace test;

struct bundled {
  std::filesystem::path folder = std::filesystem::path(KVFOLD_MODELS) / "kvfold-2m";
  engine::decoder ours = engine::decoder::load(folder);
  engine::tokenizer tokens = engine::tokenizer::load(folder, ours.shape().vocab);
  llama_model_ptr theirs = load_gguf(KVFOLD_GGUF);

  std::string text() const {
    return engine::read_file(std::filesystem::path(KVFOLD_MODELS) / "held-out.txt");
  }
};

std::vector<int> tokenize(const llama_model* model, const std::string& text) {
  std::vector<int> tokens(text.size() + 8);
  const int n =
      llama_tokenize(llama_model_get_vocab(model), text.data(), static_cast<int>(text.size()),
                     tokens.data(), static_cast<int>(tokens.size()), false, false);
  REQUIRE(n > 0);
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

}  // namespace

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
  constexpr index_t count = 512;  // behind them both engines' rotations in float differ by more
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
