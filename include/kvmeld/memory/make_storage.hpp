// SPDX-License-Identifier: MIT
/// What rows are held as, from text, as a command line has it: `make_storage("k6v4:newest=8")`.
#pragma once

#include <charconv>  // std::from_chars
#include <string>
#include <string_view>
#include <utility>  // std::pair

#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0 {

/// `float32`, `half`, `bfloat16`, `q8_0`, `q4_0` of both keys and values; `k8v4`, `k6v4`, `k4v4`:
/// values as in `q4_0`, and the newest 8 rows of each head in half. `name[:newest=N]`: another
/// number of those. Refused: another name, `newest` but of blocks, or beyond 0 to 64.
inline storage_pair make_storage(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  std::string known;
  constexpr std::pair<std::string_view, storage_pair> all[] = {
      {"float32", storage::f32},
      {"half", storage::f16},
      {"bfloat16", storage::bf16},
      {"q8_0", storage::q8_0},
      {"q4_0", storage::q4_0},
      {"k8v4", {storage::k8, storage::q4_0, 8}},
      {"k6v4", {storage::k6, storage::q4_0, 8}},
      {"k4v4", {storage::k4, storage::q4_0, 8}},
  };
  for (const auto& [known_name, type] : all) {
    known += (known.empty() ? "" : ", ") + std::string(known_name);
    if (name != known_name) {
      continue;
    }
    storage_pair made = type;
    if (std::string_view rest = text.substr(name.size()); !rest.empty()) {
      constexpr std::string_view option = ":newest=";
      rest.remove_prefix(rest.starts_with(option) ? option.size() : 0);
      const auto [end, failed] =
          std::from_chars(rest.data(), rest.data() + rest.size(), made.newest);
      expects(failed == std::errc{} && end == rest.data() + rest.size() && made.newest >= 0 &&
                  made.newest <= most_newest && in_blocks(made.values),
              "make_storage: expected a storage of blocks with :newest=0 to ", most_newest,
              ", got '", text, "'");
    }
    return made;
  }
  detail::refuse(errc::invalid_argument, "make_storage: expected one of ", known, ", got '", name,
                 "'");
}

}  // namespace kvmeld::inline v0
