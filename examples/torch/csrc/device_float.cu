// SPDX-License-Identifier: MIT
#include "device_calls.cuh"

const kvmeld_torch::device_calls& kvmeld_torch::float_calls() {
  static const device_kernels<float> calls{};
  return calls;
}
