// SPDX-License-Identifier: MIT
/// Text to tokens and back: SentencePiece's `tokenizer.model`, plain bytes, or another codec.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/matrix.hpp"

namespace engine {

/// What a chat template puts around what a user says, up to where the answer begins.
struct chat_turn {
  std::vector<int> before, after;
};

/// How one kind of vocabulary reads and writes. Safe to use from several threads.
class text_codec {
 public:
  text_codec() = default;
  virtual ~text_codec() = default;
  text_codec(const text_codec&) = delete;
  text_codec& operator=(const text_codec&) = delete;

  virtual index_t size() const = 0;
  /// `fragment`: for the middle of a sequence.
  virtual std::vector<int> encode(std::string_view text, bool fragment) const = 0;
  /// Of tokens `0 .. size() - 1`.
  virtual std::string decode(std::span<const int> tokens) const = 0;
  /// By the model's chat template; none: it has none, or one that is not known.
  virtual std::optional<chat_turn> chat() const { return {}; }
  /// What every sequence begins with, where the model was trained so.
  virtual std::optional<int> begin() const { return {}; }
};

/// No begin or end of sequence is ever added by itself. Text may be any bytes: SentencePiece reads
/// invalid UTF-8 as U+FFFD, plain bytes keep it. Safe to use from several threads.
class tokenizer {
 public:
  explicit tokenizer(std::unique_ptr<const text_codec> by) : by_(std::move(by)) {}

  /// `tokenizer.model` of `folder`; without one, a model of 256 tokens reads bytes.
  static tokenizer load(const std::filesystem::path& folder, index_t vocab);

  index_t vocab_size() const { return by_->size(); }

  /// A text from its beginning.
  std::vector<int> encode(std::string_view text) const { return by_->encode(text, false); }

  /// A piece of text for the middle of a sequence: as `encode`, but without the space that some
  /// models put before every text, and with the spaces at its ends.
  std::vector<int> encode_fragment(std::string_view text) const { return by_->encode(text, true); }

  std::string decode(std::span<const int> tokens) const;

  /// By the model's chat template; none: it has none, or one that is not known.
  std::optional<chat_turn> chat() const { return by_->chat(); }
  /// What every sequence begins with, where the model was trained so.
  std::optional<int> begin() const { return by_->begin(); }

 private:
  std::unique_ptr<const text_codec> by_;
};

/// A token for each of the 256 bytes.
std::unique_ptr<const text_codec> byte_codec();

/// Of a SentencePiece model. Refuses more than `vocab` pieces, and models that cannot encode
/// fragments.
std::unique_ptr<const text_codec> sentencepiece_codec(const std::filesystem::path& file,
                                                      index_t vocab);

}  // namespace engine
