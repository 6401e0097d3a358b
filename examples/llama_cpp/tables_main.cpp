// SPDX-License-Identifier: MIT
/// kvmeld-llama-tables FILE.gguf MODES [evaluate's arguments]: needles and streams through
/// llama.cpp, as a Markdown table. MODES: repack, own, or both with a comma between.
#include <iostream>

#include "evaluate/policies.hpp"
#include "llama_cpp/tables.hpp"

int main(int count, char** arguments) try {
  evaluate::detail::require(count > 2,
                            "kvmeld-llama-tables FILE.gguf MODES [evaluate's arguments]");
  const auto modes = kvmeld::llama::parse_modes(arguments[2]);
  kvmeld::llama::run_tables(evaluate::parse(count - 2, arguments + 2), arguments[1], modes,
                            std::cout, std::cerr);
  return 0;
} catch (const evaluate::help_request& help) {
  std::cout << help.text;
  return 0;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return dynamic_cast<const evaluate::usage_error*>(&e) != nullptr ? 2 : 1;
}
