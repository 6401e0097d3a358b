// SPDX-License-Identifier: MIT
/// What becomes of every token, step by step: followed through the plans.
#pragma once

#include <vector>

#include "evaluate/dataset.hpp"

namespace evaluate {

enum class fate : char { to_come, kept, merged, evicted };

/// `[steps][tokens]`: token `t` after step `s`, of KV head `head` of one recorded layer decoded
/// from an empty cache at `b`. A step in its parts, as `kvmeld::step` puts them together.
std::vector<std::vector<fate>> follow(const any_policy& p, const engine::config& shape,
                                      const engine::layer_record& layer, index_t head_index,
                                      index_t steps, const budget& b);

}  // namespace evaluate
