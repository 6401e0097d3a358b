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
      from.refuse("at most ", a.shape.vocab, " tokens expected, the rows of token_embd.weight; ",
                  vocabulary->size(), " came");
    }
    codec = std::move(vocabulary);
  } else if (a.shape.vocab == 256) {
    codec = byte_codec();
  } else {
    from.refuse("a vocabulary expected, or one of 256 bytes; there is none, and ", a.shape.vocab,
                " tokens");
  }
  return {std::move(network), tokenizer(std::move(codec))};
}

}  // namespace engine
