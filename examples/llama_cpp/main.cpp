// SPDX-License-Identifier: MIT
/// kvmeld-llama: a GGUF model with a compressed KV cache, on an unpatched llama.cpp.
#include <iostream>

#include "evaluate/options.hpp"
#include "llama_cpp/program.hpp"

int main(int count, char** arguments) try {
  return kvmeld::llama::run(kvmeld::llama::program_options::parse(count, arguments), std::cout,
                            std::cerr);
} catch (const evaluate::help_request& help) {
  std::cout << help.text;
  return 0;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return dynamic_cast<const evaluate::usage_error*>(&e) != nullptr ? 2 : 1;
}
