// SPDX-License-Identifier: MIT
/// `--prompts FILE`: prompts of others, each read once and asked of every policy at every budget.
#pragma once

#include <fstream>
#include <functional>
#include <ostream>
#include <string>

#include "engine/model.hpp"
#include "evaluate/options.hpp"

namespace evaluate {

/// Every prompt of `o.files`: its context is read and compressed, then its question decoded. The
/// scores, with standard errors, as a table of the model `name` and as rows of the file that
/// `open_csv` opens. 0, or 130 as `run` has it. Throws `usage_error` and `engine::format_error`
/// before that.
int ask_files(const options& o, const std::string& name, const engine::model& loaded,
              const std::function<std::ofstream()>& open_csv, std::ostream& out, std::ostream& err);

}  // namespace evaluate
