// SPDX-License-Identifier: MIT
/// One GGUF file: named values and tensors, each checked when it is read.
#pragma once

#include <gguf.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine/error.hpp"
#include "engine/tokenizer.hpp"

namespace engine::gguf {

class file {
 public:
  explicit file(const std::filesystem::path& path);

  bool has(const std::string& key) const { return gguf_find_key(values_.get(), key.c_str()) >= 0; }
  /// A positive number of things.
  index_t count(const std::string& key, std::optional<index_t> otherwise = {}) const;
  double number(const std::string& key, std::optional<double> otherwise = {}) const;
  std::string word(const std::string& key) const;

  bool has_tensor(const std::string& name) const {
    return gguf_find_tensor(values_.get(), name.c_str()) >= 0;
  }
  index_t rows(const std::string& name) const;
  /// Tensor `name [rows, columns]` as floats, whatever it is stored as.
  row_major_matrix matrix(const std::string& name, index_t rows, index_t columns) const;
  /// Tensor `name [size]`, likewise.
  row_vector vector(const std::string& name, index_t size) const;

  /// Refuses keys that begin with `prefix` and go on with none of `known`.
  void expect_keys(const std::string& prefix, std::span<const std::string_view> known) const;
  /// Refuses a file of more tensors than `read`: what is not read would be missing.
  void expect_tensors(std::size_t read) const;

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw format_error(path_, parts...);
  }

 private:
  struct closer {
    void operator()(gguf_context* values) const { gguf_free(values); }
  };

  std::int64_t key(const std::string& name, gguf_type type, const char* kind) const;
  std::int64_t tensor(const std::string& name) const;
  void copy(const std::string& name, index_t rows, index_t columns, float* out) const;

  std::filesystem::path path_;
  mutable std::ifstream in_;  // tensors are read from it
  std::unique_ptr<gguf_context, closer> values_;
};

/// The file's vocabulary, by libllama; null: it has none, as a model of bytes.
std::unique_ptr<const text_codec> vocabulary_of(const std::filesystem::path& file);

}  // namespace engine::gguf
