// SPDX-License-Identifier: MIT
#include "engine/json.hpp"

namespace engine {

std::string describe(const nlohmann::json& value) {
  return value.is_structured() ? std::string("an ") + value.type_name() : value.dump();
}

nlohmann::json parse_object(std::string_view text, const std::filesystem::path& file) {
  auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) {
    throw format_error(file, "expected a JSON object, got ",
                       json.is_discarded() ? "text that is not JSON" : describe(json));
  }
  return json;
}

}  // namespace engine
