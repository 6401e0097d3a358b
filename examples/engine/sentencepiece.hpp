// SPDX-License-Identifier: MIT
/// The codec of a SentencePiece model, `tokenizer.model`.
#pragma once

#include <sentencepiece_processor.h>

#include <filesystem>
#include <memory>

#include "engine/tokenizer.hpp"

namespace engine {

class sentencepiece_codec : public text_codec {
 public:
  /// Refuses more than `vocab` pieces.
  sentencepiece_codec(const std::filesystem::path& file, index_t vocab);

  index_t size() const override { return whole_->GetPieceSize(); }
  std::vector<int> encode(std::string_view text, bool fragment) const override;
  std::string decode(std::span<const int> tokens) const override;

 private:
  using processor = sentencepiece::SentencePieceProcessor;

  /// Whether lines can be encoded one by one, which is much faster: no piece but the newline itself
  /// contains one, and spaces around it are kept.
  bool lines_are_apart() const;
  std::vector<int> ids_by_lines(const processor* first, std::string_view text) const;

  std::unique_ptr<processor> whole_, fragment_;
  bool by_lines_ = false;  // lines one by one give the same tokens
};

}  // namespace engine
