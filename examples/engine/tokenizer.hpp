/// Text to tokens and back: SentencePiece's `tokenizer.model`, or plain bytes.
#pragma once

#include <sentencepiece_processor.h>

#include <algorithm>  // std::min, std::transform
#include <filesystem>
#include <iterator>  // std::back_inserter
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.hpp"
#include "engine/matrix.hpp"

namespace engine {

/// No begin or end of sequence is ever added. Text may be any bytes: SentencePiece reads invalid
/// UTF-8 as U+FFFD, plain bytes keep it. Safe to use from several threads.
class tokenizer {
 public:
  /// `tokenizer.model` of `folder`; without one, a model of 256 tokens reads bytes.
  static tokenizer load(const std::filesystem::path& folder, index_t vocab) {
    const auto file = folder / "tokenizer.model";
    if (std::filesystem::exists(file)) {
      return tokenizer(file, vocab);
    }
    if (vocab != 256) {
      throw format_error(folder,
                         "tokenizer.model (SentencePiece) expected in this folder, or a model of "
                         "256 tokens (bytes); there is none and vocab_size is ",
                         vocab);
    }
    return {};
  }

  index_t vocab_size() const { return whole_ ? whole_->GetPieceSize() : 256; }

  /// A text from its beginning.
  std::vector<int> encode(std::string_view text) const { return ids(whole_.get(), text); }

  /// A piece of text for the middle of a sequence: as `encode`, but without the space that some
  /// models put before every text, and with the spaces at its ends.
  std::vector<int> encode_fragment(std::string_view text) const {
    return ids(fragment_.get(), text);
  }

  std::string decode(std::span<const int> tokens) const {
    for (const int token : tokens) {
      expects(token >= 0 && token < vocab_size(), "decode: tokens 0 to ", vocab_size() - 1,
              " expected, ", token, " came");
    }
    if (!whole_) {
      return {tokens.begin(), tokens.end()};
    }
    return whole_->DecodeIds(std::vector<int>(tokens.begin(), tokens.end()));
  }

 private:
  using processor = sentencepiece::SentencePieceProcessor;

  tokenizer() = default;

  tokenizer(const std::filesystem::path& file, index_t vocab) {
    const std::string model = read_file(file);
    whole_ = parse(file, model);
    // Serialized protobufs that are put one behind the other merge: this is
    // `normalizer_spec { add_dummy_prefix: false, remove_extra_whitespaces: false }`.
    fragment_ = parse(file, model + std::string("\x1a\x04\x18\x00\x20\x00", 6));
    const auto first = fragment_->EncodeAsPieces("a");
    if (first.empty() || first[0].starts_with(space)) {
      throw format_error(file, "a piece without a leading space expected of \"a\", \"",
                         first.empty() ? "" : first[0],
                         "\" came: this model cannot encode fragments");
    }
    if (vocab_size() > vocab) {
      throw format_error(file, "at most vocab_size = ", vocab, " pieces expected, ", vocab_size(),
                         " came");
    }
    by_lines_ = lines_are_apart();
  }

  static std::unique_ptr<processor> parse(const std::filesystem::path& file,
                                          const std::string& model) {
    auto made = std::make_unique<processor>();
    if (const auto status = made->LoadFromSerializedProto(model); !status.ok()) {
      throw format_error(file, "a SentencePiece model expected: ", status.ToString());
    }
    return made;
  }

  /// Whether lines can be encoded one by one, which is much faster: no piece but the newline itself
  /// contains one, and spaces around it are kept.
  bool lines_are_apart() const {
    int newlines = 0;
    for (int piece = 0; piece < vocab_size(); ++piece) {
      newlines += whole_->IdToPiece(piece).find('\n') != std::string::npos ? 1 : 0;
    }
    const std::string_view probe = "a  \n\n  b \n c";
    return newlines == 1 && whole_->PieceToId("\n") != whole_->unk_id() &&
           ids_by_lines(whole_.get(), probe) == whole_->EncodeAsIds(probe);
  }

  std::vector<int> ids(const processor* first, std::string_view text) const {
    if (first == nullptr) {
      std::vector<int> tokens;
      std::transform(text.begin(), text.end(), std::back_inserter(tokens),
                     [](char c) { return static_cast<unsigned char>(c); });
      return tokens;
    }
    return by_lines_ ? ids_by_lines(first, text) : first->EncodeAsIds(text);
  }

  std::vector<int> ids_by_lines(const processor* first, std::string_view text) const {
    std::vector<int> tokens;
    for (const processor* by = first; !text.empty(); by = fragment_.get()) {
      const auto newline = std::min(text.find('\n'), text.size() - 1);  // npos: the rest
      const auto part = by->EncodeAsIds(text.substr(0, newline + 1));
      tokens.insert(tokens.end(), part.begin(), part.end());
      text.remove_prefix(newline + 1);
    }
    return tokens;
  }

  static constexpr const char* space = "\xe2\x96\x81";  // U+2581, a space in pieces

  std::unique_ptr<processor> whole_, fragment_;  // null: bytes
  bool by_lines_ = false;                        // lines one by one give the same tokens
};

}  // namespace engine
