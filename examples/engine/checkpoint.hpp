// SPDX-License-Identifier: MIT
/// A model's weights: one safetensors file, or several with an index.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "engine/matrix.hpp"
#include "engine/safetensors.hpp"

namespace engine {

/// `model.safetensors` of a folder, or the shards that its `model.safetensors.index.json` names.
class checkpoint {
 public:
  explicit checkpoint(const std::filesystem::path& folder);

  /// Tensor `name [rows, columns]`.
  row_major_matrix matrix(const std::string& name, index_t rows, index_t columns) const;

  /// Tensor `name [size]`.
  row_vector vector(const std::string& name, index_t size) const;

 private:
  void open_shards(const std::filesystem::path& folder);
  const safetensors_file& holder(const std::string& name) const;

  std::map<std::string, safetensors_file> shards_;  // a map: the pointers below stay
  std::map<std::string, const safetensors_file*> holders_;
  const safetensors_file* whole_ = nullptr;
  std::filesystem::path index_path_;
};

}  // namespace engine
