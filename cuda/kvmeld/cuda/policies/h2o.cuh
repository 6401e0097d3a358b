// SPDX-License-Identifier: MIT
/// h2o on the device.
#pragma once

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/policies/h2o.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<h2o> : evicting_policy {
  static sum_rule rule(const h2o& policy, const attention_spec&) {
    return {policy.combine, policy.sinks, policy.recent};
  }
};

}  // namespace kvmeld::cuda
