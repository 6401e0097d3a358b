/// full_cache on the device.
#pragma once

#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/policies/full_cache.hpp"

namespace kvfold::cuda {

template <>
struct device_policy<full_cache> {
  static no_rule rule(const full_cache&, index_t) { return {}; }
};

}  // namespace kvfold::cuda
