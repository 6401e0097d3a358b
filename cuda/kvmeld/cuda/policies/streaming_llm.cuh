// SPDX-License-Identifier: MIT
/// streaming_llm on the device.
#pragma once

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/policies/streaming_llm.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<streaming_llm> : evicting_policy {
  static position_rule rule(const streaming_llm& policy, const attention_spec&) {
    expects(policy.positions == streaming_llm::position_mode::original,
            "cuda streaming_llm: expected original positions, got cache_index");
    return {{}, policy.sinks};
  }
};

}  // namespace kvmeld::cuda
