// SPDX-License-Identifier: MIT
/// JSON files with errors that name the file, what was expected and what it has.
#pragma once

#include <cmath>  // std::isfinite
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "engine/error.hpp"
#include "kvmeld/config.hpp"

namespace engine {

using kvmeld::index_t;

/// A value for an error message. Only its kind where it may be long, or deeper than the stack.
inline std::string describe(const nlohmann::json& value) {
  return value.is_structured() ? std::string("an ") + value.type_name() : value.dump();
}

/// What is in `file`.
inline nlohmann::json parse_object(std::string_view text, const std::filesystem::path& file) {
  auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) {
    throw format_error(file, "expected a JSON object, got ",
                       json.is_discarded() ? "text that is not JSON" : describe(json));
  }
  return json;
}

/// One JSON object's fields, with errors that name the file, the field and its value.
class json_fields {
 public:
  /// Refers to both.
  json_fields(const nlohmann::json& object, const std::filesystem::path& file)
      : object_(object), file_(file) {}

  /// Null counts as absent, as Hugging Face writes it.
  bool has(const char* name) const { return object_.contains(name) && !object_.at(name).is_null(); }
  const nlohmann::json& at(const char* name) const {
    if (!has(name)) {
      throw format_error(file_, "expected \"", name, "\"");
    }
    return object_.at(name);
  }

  /// A count, 1 to what an index holds.
  index_t count(const char* name, std::optional<index_t> otherwise = {}) const {
    if (otherwise && !has(name)) {
      return *otherwise;
    }
    constexpr auto most = std::numeric_limits<index_t>::max();
    const auto& value = at(name);
    const std::int64_t n = value.is_number_integer() ? value.get<std::int64_t>() : 0;
    expect(n >= 1 && n <= most, name, "an integer from 1 to ", most);
    return static_cast<index_t>(n);
  }
  double positive(const char* name, std::optional<double> otherwise = {}) const {
    if (otherwise && !has(name)) {
      return *otherwise;
    }
    const auto& value = at(name);
    const double x = value.is_number() ? value.get<double>() : 0;
    expect(std::isfinite(x) && x > 0, name, "a positive number");
    return x;
  }
  bool flag(const char* name, bool otherwise) const {
    if (!has(name)) {
      return otherwise;
    }
    expect(at(name).is_boolean(), name, "true or false");
    return at(name).get<bool>();
  }
  std::string word(const char* name) const {
    expect(at(name).is_string(), name, "a string");
    return at(name).get<std::string>();
  }
  const nlohmann::json& object(const char* name) const {
    expect(at(name).is_object(), name, "an object");
    return at(name);
  }

  /// `expect(ok, "hidden_act", "\"silu\"")`: for what only the caller can judge.
  template <class... Parts>
  void expect(bool ok, const char* name, const Parts&... expected) const {
    if (!ok) {
      throw format_error(file_, "\"", name, "\": expected ", expected..., ", got ",
                         describe(at(name)));
    }
  }

 private:
  const nlohmann::json& object_;
  const std::filesystem::path& file_;
};

}  // namespace engine
