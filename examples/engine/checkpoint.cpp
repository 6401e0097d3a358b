// SPDX-License-Identifier: MIT
#include "engine/checkpoint.hpp"

#include "engine/error.hpp"
#include "engine/json.hpp"

namespace engine {

checkpoint::checkpoint(const std::filesystem::path& folder) {
  const auto single = folder / "model.safetensors";
  const auto index = folder / "model.safetensors.index.json";
  if (std::filesystem::exists(single)) {
    whole_ = &shards_.emplace("", single).first->second;
  } else if (std::filesystem::exists(index)) {
    index_path_ = index;
    open_shards(folder);
  } else {
    throw format_error(folder,
                       "expected model.safetensors or model.safetensors.index.json in this "
                       "folder, got neither");
  }
}

row_major_matrix checkpoint::matrix(const std::string& name, index_t rows, index_t columns) const {
  return holder(name).matrix(name, rows, columns);
}

row_vector checkpoint::vector(const std::string& name, index_t size) const {
  return holder(name).vector(name, size);
}

void checkpoint::open_shards(const std::filesystem::path& folder) {
  const auto json = parse_object(read_file(index_path_), index_path_);
  const auto& map = json_fields(json, index_path_).object("weight_map");
  for (const auto& [name, value] : map.items()) {
    const std::string shard = value.is_string() ? value.get<std::string>() : "";
    // The name alone: an index must not lead out of its folder.
    if (shard.empty() || std::filesystem::path(shard).filename() != shard || shard == "..") {
      throw format_error(index_path_, "tensor \"", name, "\": expected a file name, got ",
                         describe(value));
    }
    if (!shards_.contains(shard)) {
      if (!std::filesystem::exists(folder / shard)) {
        throw format_error(index_path_, "expected shard \"", shard, "\" in the same folder");
      }
      shards_.emplace(shard, folder / shard);
    }
    const auto& file = shards_.at(shard);
    if (!file.contains(name)) {
      throw format_error(index_path_, "expected tensor \"", name, "\" in shard \"", shard, "\"");
    }
    holders_.emplace(name, &file);
  }
}

const safetensors_file& checkpoint::holder(const std::string& name) const {
  if (whole_ != nullptr) {
    return *whole_;
  }
  const auto found = holders_.find(name);
  if (found == holders_.end()) {
    throw format_error(index_path_, "expected tensor \"", name, "\" in a shard");
  }
  return *found->second;
}

}  // namespace engine
