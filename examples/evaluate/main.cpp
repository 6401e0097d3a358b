// SPDX-License-Identifier: MIT
#include <unistd.h>  // isatty

#include <iostream>

#include "engine/error.hpp"
#include "evaluate/options.hpp"
#include "evaluate/parallel.hpp"

int main(int count, char** arguments) {
  try {
    auto options = evaluate::parse(count, arguments);
    options.terminal = isatty(STDERR_FILENO) != 0;
    evaluate::catch_interrupts();
    return evaluate::run(options, std::cout, std::cerr);
  } catch (const evaluate::help_request& help) {
    std::cout << help.text;
    return 0;
  } catch (const std::exception& e) {
    std::cerr << "evaluate: " << e.what() << '\n';
    const bool of_caller = dynamic_cast<const evaluate::usage_error*>(&e) != nullptr ||
                           dynamic_cast<const engine::format_error*>(&e) != nullptr;
    return of_caller ? 2 : 1;
  }
}
