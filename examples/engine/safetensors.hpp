// SPDX-License-Identifier: MIT
/// One file of the safetensors format: named tensors behind a JSON header.
/// https://huggingface.co/docs/safetensors: `u64 n | n bytes of JSON | the tensors' bytes`,
/// little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "engine/mapped_file.hpp"
#include "engine/matrix.hpp"

namespace engine {

/// Checks the whole header when it opens, so that `read` can trust every offset.
class safetensors_file {
 public:
  explicit safetensors_file(const std::filesystem::path& file) : path_(file), mapped_(file) {
    open(mapped_.bytes());
  }
  /// What is in `file`, where it is in memory already; refers to the bytes.
  safetensors_file(std::span<const std::byte> bytes, const std::filesystem::path& file)
      : path_(file) {
    open(bytes);
  }

  const std::filesystem::path& path() const { return path_; }
  bool contains(const std::string& name) const { return tensors_.contains(name); }

  /// Tensor `name [rows, columns]` as floats; it may be stored as F32, F16 or BF16.
  row_major_matrix matrix(const std::string& name, index_t rows, index_t columns) const;

  /// Tensor `name [size]`, likewise.
  row_vector vector(const std::string& name, index_t size) const;

 private:
  struct tensor {
    std::string dtype;
    std::vector<std::uint64_t> shape;
    std::size_t begin, end;  // in data_
  };

  void open(std::span<const std::byte> bytes);
  nlohmann::json parse_header(std::span<const std::byte> bytes);
  tensor checked(const std::string& name, const nlohmann::json& entry) const;
  /// Tensors lie one behind the other and fill the file: what the format demands.
  void expect_no_holes() const;
  const tensor& find(const std::string& name, std::initializer_list<index_t> shape) const;
  void copy(const std::string& name, const tensor& t, std::span<float> out) const;

  std::filesystem::path path_;
  mapped_file mapped_;
  std::span<const std::byte> data_;
  std::map<std::string, tensor> tensors_;
};

}  // namespace engine
