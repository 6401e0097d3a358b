// SPDX-License-Identifier: MIT
/// Task `stream`: the attention error while decoding ten times the budget from an empty cache.
#pragma once

#include "evaluate/attention_error.hpp"

namespace evaluate {

/// Mean over layers, query heads and streams `[stream_budgets − 1]`, of as many steps as the budget
/// has slots each, without the first ones (before, nothing is evicted). Every layer decodes the
/// full model's own queries, keys and values, so that errors do not add up over layers.
std::vector<double> stream_error(const contender& c, const engine::config& shape,
                                 const std::vector<stream_record>& streams, const workers& on);

}  // namespace evaluate
