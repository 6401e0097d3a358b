// SPDX-License-Identifier: MIT
/// Needles and streams through llama.cpp, as `evaluate` asks them of our own engine.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "evaluate/options.hpp"
#include "llama_cpp/session.hpp"

namespace kvmeld::llama {

/// "repack", "own", or both with a comma between. Throws `usage_error`.
std::vector<mode> parse_modes(const std::string& list);

/// A Markdown table to `out`: the full cache, then for every budget of `o` every policy, in every
/// mode; under `fold` and `kvmerger` shared, then equal budgets. Throws `usage_error` where a
/// policy's name divides budgets or chooses queries.
///   needle          a fact planted in a prompt of `o.prompt` tokens, one micro-batch, which is
///                   compressed before the question comes
///   decoded needle  a fact in the first tenth of a text that comes in chunks of 64
///   stream nll, KL  of `o.prompts` texts in chunks of 64, without their first quarter
/// Without the task `stream` of `o` the needles of whole prompts alone.
void run_tables(const evaluate::options& o, const std::string& gguf, const std::vector<mode>& modes,
                std::ostream& out, std::ostream& said);

}  // namespace kvmeld::llama
