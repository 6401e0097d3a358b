// SPDX-License-Identifier: MIT
#include "engine/gguf.hpp"
#include "engine/gguf/vocabulary.hpp"
#include "engine/gguf/weights.hpp"

namespace engine {

model load_gguf(const std::filesystem::path& path) {
  const gguf::file from(path);
  const auto a = gguf::read_architecture(from);
  decoder network(a.shape, gguf::read_weights(from, a));
  auto vocabulary = std::make_unique<gguf::vocabulary>(path);
  std::unique_ptr<const text_codec> codec;
  if (vocabulary->is_there()) {
    if (vocabulary->size() > a.shape.vocab) {
      from.refuse("expected at most ", a.shape.vocab,
                  " tokens (the rows of token_embd.weight), got ", vocabulary->size());
    }
    codec = std::move(vocabulary);
  } else if (a.shape.vocab == 256) {
    codec = byte_codec();
  } else {
    from.refuse("expected a vocabulary, or 256 tokens (bytes) without one, got ", a.shape.vocab,
                " tokens");
  }
  return {std::move(network), tokenizer(std::move(codec))};
}

}  // namespace engine
