// SPDX-License-Identifier: MIT
#include <unistd.h>  // isatty

#include <iostream>

#include "engine/error.hpp"
#include "evaluate/evaluate.hpp"
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
  } catch (const evaluate::usage_error& e) {
    std::cerr << "evaluate: " << e.what() << '\n';
    return 2;
  } catch (const engine::format_error& e) {
    std::cerr << "evaluate: " << e.what() << '\n';
    return 2;
  } catch (const std::exception& e) {
    std::cerr << "evaluate: " << e.what() << '\n';
    return 1;
  }
}
