/// Text to tokens and back: SentencePiece's `tokenizer.model`, or plain bytes.
#pragma once

#include <sentencepiece_processor.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/matrix.hpp"

namespace engine {

/// No begin or end of sequence is ever added. Text may be any bytes: SentencePiece reads invalid
/// UTF-8 as U+FFFD, plain bytes keep it. Safe to use from several threads.
class tokenizer {
 public:
  /// `tokenizer.model` of `folder`; without one, a model of 256 tokens reads bytes.
  static tokenizer load(const std::filesystem::path& folder, index_t vocab);

  index_t vocab_size() const { return whole_ ? whole_->GetPieceSize() : 256; }

  /// A text from its beginning.
  std::vector<int> encode(std::string_view text) const { return ids(whole_.get(), text); }

  /// A piece of text for the middle of a sequence: as `encode`, but without the space that some
  /// models put before every text, and with the spaces at its ends.
  std::vector<int> encode_fragment(std::string_view text) const {
    return ids(fragment_.get(), text);
  }

  std::string decode(std::span<const int> tokens) const;

 private:
  using processor = sentencepiece::SentencePieceProcessor;

  tokenizer() = default;

  tokenizer(const std::filesystem::path& file, index_t vocab);
  /// Whether lines can be encoded one by one, which is much faster: no piece but the newline itself
  /// contains one, and spaces around it are kept.
  bool lines_are_apart() const;
  std::vector<int> ids(const processor* first, std::string_view text) const;
  std::vector<int> ids_by_lines(const processor* first, std::string_view text) const;

  std::unique_ptr<processor> whole_, fragment_;  // null: bytes
  bool by_lines_ = false;                        // lines one by one give the same tokens
};

}  // namespace engine
