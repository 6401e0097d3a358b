// SPDX-License-Identifier: MIT
#include <sentencepiece_processor.h>

#include <algorithm>  // std::min

#include "engine/error.hpp"
#include "engine/tokenizer.hpp"

namespace engine {

namespace {

using processor = sentencepiece::SentencePieceProcessor;

constexpr const char* space = "\xe2\x96\x81";  // U+2581, a space in pieces

std::unique_ptr<processor> parse(const std::filesystem::path& file, const std::string& model) {
  auto made = std::make_unique<processor>();
  if (const auto status = made->LoadFromSerializedProto(model); !status.ok()) {
    throw format_error(file, "expected a SentencePiece model, got ", status.ToString());
  }
  return made;
}

/// The codec of a SentencePiece model.
class pieces : public text_codec {
 public:
  pieces(const std::filesystem::path& file, index_t vocab) {
    const std::string model = read_file(file);
    whole_ = parse(file, model);
    // Serialized protobufs that are put one behind the other merge: this is
    // `normalizer_spec { add_dummy_prefix: false, remove_extra_whitespaces: false }`.
    fragment_ = parse(file, model + std::string("\x1a\x04\x18\x00\x20\x00", 6));
    const auto first = fragment_->EncodeAsPieces("a");
    if (first.empty() || first[0].starts_with(space)) {
      throw format_error(file, "expected a piece without a leading space for \"a\", got \"",
                         first.empty() ? "" : first[0], "\" (this model cannot encode fragments)");
    }
    if (size() > vocab) {
      throw format_error(file, "expected at most vocab_size = ", vocab, " pieces, got ", size());
    }
    by_lines_ = lines_are_apart();
  }

  index_t size() const override { return whole_->GetPieceSize(); }
  std::vector<int> encode(std::string_view text, bool fragment) const override {
    const processor* const by = fragment ? fragment_.get() : whole_.get();
    return by_lines_ ? ids_by_lines(by, text) : by->EncodeAsIds(text);
  }
  std::string decode(std::span<const int> tokens) const override {
    return whole_->DecodeIds(std::vector<int>(tokens.begin(), tokens.end()));
  }

 private:
  /// Whether lines can be encoded one by one, which is much faster: no piece but the newline itself
  /// contains one, and spaces around it are kept.
  bool lines_are_apart() const {
    int newlines = 0;
    for (int piece = 0; piece < size(); ++piece) {
      newlines += whole_->IdToPiece(piece).find('\n') != std::string::npos ? 1 : 0;
    }
    const std::string_view probe = "a  \n\n  b \n c";
    return newlines == 1 && whole_->PieceToId("\n") != whole_->unk_id() &&
           ids_by_lines(whole_.get(), probe) == whole_->EncodeAsIds(probe);
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

  std::unique_ptr<processor> whole_, fragment_;
  bool by_lines_ = false;  // lines one by one give the same tokens
};

}  // namespace

std::unique_ptr<const text_codec> sentencepiece_codec(const std::filesystem::path& file,
                                                      index_t vocab) {
  return std::make_unique<pieces>(file, vocab);
}

}  // namespace engine
