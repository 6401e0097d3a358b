// SPDX-License-Identifier: MIT
/// What was asked for on the command line, and the main job: every policy at every budget, as a
/// table, a CSV file and pictures.
#pragma once

#include <algorithm>  // std::max
#include <cstdint>
#include <filesystem>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "evaluate/policies.hpp"

namespace evaluate {

/// Not options: the caller wants to know them.
struct help_request {
  std::string text;
};

/// What a head may hold: a share of the prompt's slots, so many slots, or a share of the full
/// cache's bytes, whatever a policy spends them on.
struct budget_option {
  enum class unit { share, slots, bytes };

  double given = 1;
  unit of = unit::share;

  /// Not of bytes: the slots of every policy.
  index_t slots(index_t prompt) const {
    return of == unit::share ? std::max(index_t{1}, static_cast<index_t>(given * prompt + 0.5))
                             : static_cast<index_t>(given);
  }
  /// As it was given.
  std::string text() const;
};

struct task_set {
  bool error = false, nll = false, needle = false, stream = false, speed = false, chain = false,
       ruler = false, stream_needle = false, copy = false;

  /// Is there anything for the second table?
  bool second_table() const { return chain || ruler || stream_needle || copy; }
};

struct options {
  std::filesystem::path model, text;
  std::vector<named_policy> policies = all_policies();
  std::vector<budget_option> budgets = {{0.05}, {0.1}, {0.2}};
  task_set tasks = {true, true, true, true, true};
  index_t prompt = 896;  ///< tokens
  index_t prompts = 2;
  std::vector<std::filesystem::path> files = {};  ///< prompts of others, in place of all tasks
  index_t cases = 40;                             ///< needle prompts
  double memory = 4;  ///< GiB for needle prompts: so many are held at once
  index_t needles = 4;
  index_t digits = 5;
  index_t samples = 20;  ///< prompts of each task of chain, ruler and stream_needle
  index_t future = 64;   ///< true future queries that `attention_error` is the mean of
  index_t room = 0;      ///< slots beside the budget for what comes after a prompt
  kvmeld::future_positions ahead = {};  ///< where foreseen queries go
  std::string needle = " The secret code of {key} is {value}. ";
  std::string question = "\nQuestion: what is the secret code of {key}? Answer:";
  bool chat = false;  ///< needle cases are a user's turn, by the model's chat template
  index_t threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::uint64_t seed = 1;
  std::filesystem::path profile = {};    ///< empty: none
  std::filesystem::path calibrate = {};  ///< likewise
  std::filesystem::path surrogate = {};  ///< likewise
  std::filesystem::path csv = "build/results/evaluation.csv";
  std::filesystem::path plots = "build/results";
  bool terminal = false;  ///< is the output a terminal?

  /// `future` where anything looks at the attention of the tokens after a prompt: the task, or a
  /// profile that is to be made; else 0.
  index_t future_tokens() const {
    return tasks.error || (!profile.empty() && !std::filesystem::exists(profile)) ? future : 0;
  }
};

/// Throws `usage_error` or `help_request`.
options parse(int count, const char* const* arguments);

/// Writes the table to `out`, progress to `err`. 0: all is done; 130: Ctrl-C came, and the rows
/// done by then are kept. Throws `usage_error` before anything is run.
int run(options o, std::ostream& out, std::ostream& err);

}  // namespace evaluate
