// SPDX-License-Identifier: MIT
/// full_cache on the device.
#pragma once

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/policies/full_cache.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<full_cache> {
  static no_rule rule(const full_cache&, const attention_spec&) { return {}; }
};

}  // namespace kvmeld::cuda
