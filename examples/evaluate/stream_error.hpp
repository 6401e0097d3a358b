/// Task `stream`: the attention error while decoding ten times the budget from an empty cache.
#pragma once

#include "evaluate/attention_error.hpp"

namespace evaluate {

/// Mean over layers, query heads, streams and the steps after the first `budget` ones (before,
/// nothing leaves). Every layer decodes the full model's own queries, keys and values, so that
/// errors do not add up over layers.
double stream_error(const contender& c, const engine::config& shape,
                    const std::vector<stream_record>& streams, const workers& on);

}  // namespace evaluate
