// SPDX-License-Identifier: MIT
/// `--profile`: how a model's heads share its slots, in a file. It is made of the thresholds of a
/// run's prompts and of the errors behind them. In a later run `+profile` divides by it in place of
/// a threshold, and clusters of fold go by the errors.
#pragma once

#include <filesystem>

#include "evaluate/dataset.hpp"
#include "evaluate/plan.hpp"

namespace evaluate {

/// Gives the profile in `file`, of so many heads, to every contender whose heads share the model's
/// slots, for prompts of `tokens`; false: there is no such file. Throws `usage_error`: something
/// else, another model's, no file and a contender that needs one.
bool load_profile(plan& todo, const std::filesystem::path& file, index_t heads, index_t tokens);

/// The one contender whose thresholds a file can be made of. Throws `usage_error`: none, several.
const contender& profiled(const plan& todo);

/// Makes `file` of the thresholds of the prompts, and of what heads' errors weigh behind them.
void save_profile(const contender& c, const engine::decoder& model,
                  const std::vector<text_prompt>& prompts, const std::filesystem::path& file,
                  const workers& on);

}  // namespace evaluate
