// SPDX-License-Identifier: MIT
/// kvmeld-run: any program that links to libllama, unmodified, with its KV cache compressed.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstring>  // std::strerror
#include <filesystem>
#include <iostream>

#include "llama_cpp/run/options.hpp"

namespace {

namespace fs = std::filesystem;
using kvmeld::llama::run::amount;
using kvmeld::llama::run::settings;

#ifdef __APPLE__
constexpr const char *preload = "DYLD_INSERT_LIBRARIES", *library = "libkvmeld-run.dylib";
#else
constexpr const char *preload = "LD_PRELOAD", *library = "libkvmeld-run.so";
#endif

/// Beside this program, or in the `lib` beside its folder.
fs::path find_library(const char* self) {
  std::error_code none;
  const fs::path link = fs::read_symlink("/proc/self/exe", none),
                 folder = (none ? fs::absolute(self) : link).parent_path();
  for (const fs::path& at : {folder / library, folder.parent_path() / "lib" / library}) {
    if (fs::exists(at)) {
      expects(kvmeld::errc::invalid_argument, at.string().find_first_of(": ") == std::string::npos,
              "kvmeld-run: expected a path without spaces and colons (", preload, "), got '",
              at.string(), "'");
      return at;
    }
  }
  kvmeld::detail::refuse(kvmeld::errc::invalid_argument, "kvmeld-run: expected ", library,
                         " beside this program, got none in '", folder.string(), "'");
}

}  // namespace

int main(int count, char** arguments) try {
  CLI::App app(
      "Runs a program that links to libllama with its KV cache compressed:\n"
      "  kvmeld-run --budget 10% -- llama-server -m model.gguf -c 8192",
      "kvmeld-run");
  std::string budget = "10%", policy = "fold", rows = settings::default_rows, refusal = "continue";
  bool equal = false;
  std::vector<std::string> program;
  app.option_defaults()->take_last()->always_capture_default();
  app.add_option(
      "--budget", budget,
      "of a sequence: a share of the bytes that its tokens (-c) take in 16 bits, bytes as "
      "64MiB, or slots per head");
  app.add_option("--policy", policy, "name[:option=value,...]");
  app.add_option("--rows", rows,
                 "what keys and values are held as: half, q8_0, k8v4, k6v4 or k4v4[:newest=N]");
  app.add_flag("--equal", equal, "under fold and kvmerger too the same budget for every head");
  app.add_option("--on-refusal", refusal, "where a model cannot be compressed: continue or stop")
      ->check(CLI::IsMember({"continue", "stop"}));
  app.add_option("program", program, "after --: the program and its arguments")
      ->required()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  try {
    app.parse(count, arguments);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return 0;
  } catch (const CLI::Error& e) {
    std::cerr << "kvmeld-run: " << e.what() << '\n';
    return 2;
  }
  const settings s{.budget = amount::parse(budget),
                   .policy = kvmeld::make_policy(policy),
                   .rows = kvmeld::make_storage(rows),
                   .equal = equal};
  const std::string before = std::getenv(preload) != nullptr ? std::getenv(preload) : "";
  const std::string libraries = find_library(arguments[0]).string() + (before.empty() ? "" : ":");
  setenv(preload, (libraries + before).c_str(), 1);
  unsetenv("LD_BIND_NOW");  // it would look for libllama in every program that this one starts
  setenv(settings::budget_name, budget.c_str(), 1);
  setenv(settings::policy_name, policy.c_str(), 1);
  setenv(settings::rows_name, rows.c_str(), 1);
  setenv(settings::equal_name, equal ? "1" : "0", 1);
  setenv(settings::stop_name, refusal == "stop" ? "1" : "0", 1);
  if (s.is_shared()) {
    // The server's checkpoints are made within a prompt, which would end there.
    setenv("LLAMA_ARG_CTX_CHECKPOINTS", "0", 0);
  }
  std::vector<char*> list;
  for (std::string& one : program) {
    list.push_back(one.data());
  }
  list.push_back(nullptr);
  execvp(list[0], list.data());
  std::cerr << "kvmeld-run: expected a program that can be run, got '" << list[0]
            << "': " << std::strerror(errno) << '\n';
  return 1;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return 2;
}
