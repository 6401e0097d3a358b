// SPDX-License-Identifier: MIT
#include "engine/tokenizer.hpp"

#include "engine/error.hpp"

namespace engine {

namespace {

class bytes : public text_codec {
 public:
  index_t size() const override { return 256; }
  std::vector<int> encode(std::string_view text, bool) const override {
    const auto* const first = reinterpret_cast<const unsigned char*>(text.data());
    return {first, first + text.size()};
  }
  std::string decode(std::span<const int> tokens) const override {
    return {tokens.begin(), tokens.end()};
  }
};

}  // namespace

std::unique_ptr<const text_codec> byte_codec() { return std::make_unique<bytes>(); }

tokenizer tokenizer::load(const std::filesystem::path& folder, index_t vocab) {
  const auto file = folder / "tokenizer.model";
  if (std::filesystem::exists(file)) {
    return tokenizer(sentencepiece_codec(file, vocab));
  }
  if (std::filesystem::exists(folder / "tokenizer.json")) {
    const auto name = (folder / "").parent_path().string();
    throw format_error(
        folder,
        "expected tokenizer.model (SentencePiece), got tokenizer.json alone. llama.cpp "
        "makes a GGUF of it, which --model takes: python3 "
        "llama.cpp/convert_hf_to_gguf.py ",
        name, " --outfile ", name, ".gguf");
  }
  if (vocab != 256) {
    throw format_error(folder,
                       "expected tokenizer.model (SentencePiece) in this folder, or a model of "
                       "256 tokens (bytes), got no tokenizer.model and a vocab_size of ",
                       vocab);
  }
  return tokenizer(byte_codec());
}

std::string tokenizer::decode(std::span<const int> tokens) const {
  for (const int token : tokens) {
    expects(token >= 0 && token < vocab_size(), "decode: expected tokens 0 to ", vocab_size() - 1,
            ", got ", token);
  }
  return by_->decode(tokens);
}

}  // namespace engine
