// SPDX-License-Identifier: MIT
/// A model's weights: one file of the safetensors format, or several with an index. A file is a
/// JSON header and named tensors: `u64 n | n bytes of JSON | the tensors' bytes`, little-endian
/// (https://huggingface.co/docs/safetensors).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <istream>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/matrix.hpp"

namespace engine {

/// Checks the whole header when it opens, so that every offset can be trusted.
class safetensors_file {
 public:
  explicit safetensors_file(const std::filesystem::path& file);
  /// What `in` has, as if it were in `file`.
  safetensors_file(std::unique_ptr<std::istream> in, const std::filesystem::path& file);

  bool contains(const std::string& name) const { return tensors_.contains(name); }
  /// The first extent of tensor `name`; 0: there is none.
  index_t rows(const std::string& name) const;

  /// Tensor `name [rows, columns]` as floats; it may be stored as F32, F16 or BF16.
  row_major_matrix matrix(const std::string& name, index_t rows, index_t columns) const;

  /// Tensor `name [size]`, likewise.
  row_vector vector(const std::string& name, index_t size) const;

 private:
  struct tensor {
    std::string dtype;
    std::vector<std::uint64_t> shape;
    std::size_t begin, end;  // behind the header
  };

  nlohmann::json read_header();
  tensor checked(const std::string& name, const nlohmann::json& entry) const;
  /// Tensors lie one behind the other and fill the file: what the format demands.
  void expect_no_holes() const;
  const tensor& find(const std::string& name, std::initializer_list<index_t> shape) const;
  void read(const std::string& name, const tensor& t, float* out, Eigen::Index count) const;

  std::unique_ptr<std::istream> in_;
  std::filesystem::path path_;
  std::size_t first_ = 0, size_ = 0;  // where tensors begin, and their bytes
  std::map<std::string, tensor> tensors_;
};

/// `model.safetensors` of a folder, or the shards that its `model.safetensors.index.json` names.
class checkpoint {
 public:
  explicit checkpoint(const std::filesystem::path& folder);

  /// Tensor `name [rows, columns]`.
  row_major_matrix matrix(const std::string& name, index_t rows, index_t columns) const {
    return holder(name).matrix(name, rows, columns);
  }
  /// Tensor `name [size]`.
  row_vector vector(const std::string& name, index_t size) const {
    return holder(name).vector(name, size);
  }

 private:
  void open_shards(const std::filesystem::path& folder);
  const safetensors_file& holder(const std::string& name) const;

  std::map<std::string, safetensors_file> shards_;  // a map: the pointers below stay
  std::map<std::string, const safetensors_file*> holders_;
  std::filesystem::path index_path_;  // empty: the one shard has all
};

}  // namespace engine
