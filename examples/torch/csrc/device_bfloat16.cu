// SPDX-License-Identifier: MIT
#include "device_calls.cuh"

const kvmeld_torch::device_calls& kvmeld_torch::bfloat16_calls() {
  static const device_kernels<gpu::bfloat16> calls{};
  return calls;
}
