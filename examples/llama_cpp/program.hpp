// SPDX-License-Identifier: MIT
/// What `kvmeld-llama` is asked to do.
#pragma once

#include <string>
#include <vector>

#include "llama_cpp/session.hpp"

namespace kvmeld::llama {

struct program_options {
  std::string model, prompt_file;
  std::string policy = "fold", mode = "own", cache_type = "f16";
  index_t budget = 512, trigger = 0, room = 0, predict = 64, draft = 0, chunk = 0, cells = 0,
          pin = 0, threads = 1;
  std::vector<index_t> untouched = {};
  bool equal = false, perplexity = false, alone = false;

  /// Refused, in one line, as `evaluate::usage_error`: what cannot be.
  static program_options parse(int count, const char* const* arguments);
};

/// Runs it: the text to `out` as it comes, then the table; progress to `progress`.
int run(program_options o, std::ostream& out, std::ostream& progress);

}  // namespace kvmeld::llama
