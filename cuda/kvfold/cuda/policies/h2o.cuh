/// h2o on the device.
#pragma once

#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/cuda/policies/evicting_rules.cuh"
#include "kvfold/policies/h2o.hpp"

namespace kvfold::cuda {

template <>
struct device_policy<h2o> : evicting_policy {
  static sum_rule rule(const h2o& policy, index_t) {
    return {policy.combine, policy.sinks, policy.recent};
  }
};

}  // namespace kvfold::cuda
