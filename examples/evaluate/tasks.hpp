// SPDX-License-Identifier: MIT
/// The tasks of the second table: which there are, and what each policy loses on them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/tokenizer.hpp"
#include "evaluate/parallel.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// Those of `chain` and `ruler` that were asked for, their samples drawn; a note for each that does
/// not fit into the prompt. They refer to all that is given. Throws `usage_error`.
std::vector<task> make_tasks(const options& o, const plan& todo, const engine::decoder& model,
                             const engine::tokenizer& tokens, std::span<const int> text,
                             std::vector<std::string>& notes);

/// None, and a note, when the full cache answers less than half.
std::optional<task_outcome> run_task(const task& t, const options& o, const plan& todo,
                                     const workers& on, progress& bar,
                                     std::vector<std::string>& notes);

}  // namespace evaluate
