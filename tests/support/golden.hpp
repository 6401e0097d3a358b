// SPDX-License-Identifier: MIT
// What the authors' own code computed on small random inputs (tests/data/golden).
//
// Arrays are flat, [heads, tokens, dim]; a token is of the prompt or of a step after it.
#pragma once

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/paths.hpp"

namespace golden {

using row = std::vector<double>;
using rows = std::vector<row>;

/// Folder of the files: the environment's KVMELD_GOLDEN, else the source tree's.
inline std::string folder() {
  const char* given = std::getenv("KVMELD_GOLDEN");
  return given ? given : paths::data("golden");
}

/// One case of one file.
class record {
 public:
  explicit record(nlohmann::json data) : data_(std::move(data)) {}

  int number(const char* name) const { return data_.at(name).get<int>(); }
  double real(const char* name) const { return data_.at(name).get<double>(); }
  std::string text(const char* name) const { return data_.at(name).get<std::string>(); }
  bool has(const char* name) const { return data_.contains(name); }
  int heads() const { return number("heads"); }
  int dim() const { return number("dim"); }
  int prompt() const { return number("prompt"); }
  int steps() const { return has("step") ? static_cast<int>(data_.at("step").size()) : 0; }
  record step(int i) const { return record(data_.at("step").at(static_cast<std::size_t>(i))); }

  /// The numbers of one head: a whole array is [heads, ...].
  row of_head(const char* name, int head, int heads) const {
    const row all = data_.at(name).get<row>();
    const auto each = static_cast<std::ptrdiff_t>(all.size()) / heads;
    return row(all.begin() + head * each, all.begin() + (head + 1) * each);
  }
  /// The vectors of one head, [tokens][dim].
  rows of_head(const char* name, int head, int heads, int dim) const {
    const row flat = of_head(name, head, heads);
    rows r;
    for (std::size_t at = 0; at < flat.size(); at += static_cast<std::size_t>(dim))
      r.emplace_back(flat.begin() + static_cast<std::ptrdiff_t>(at),
                     flat.begin() + static_cast<std::ptrdiff_t>(at) + dim);
    return r;
  }
  std::vector<record> cases() const {
    std::vector<record> all;
    for (const auto& c : data_.at("cases")) all.emplace_back(c);
    return all;
  }

 private:
  nlohmann::json data_;
};

/// `name` is the file's, without .json: h2o, snapkv, streaming_llm, zsmerge, keepkv_code.
inline record load(const std::string& name) {
  const std::string path = folder() + "/" + name + ".json";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("golden: expected a file at " + path);
  return record(nlohmann::json::parse(file));
}

}  // namespace golden
