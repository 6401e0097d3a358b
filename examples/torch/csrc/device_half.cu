// SPDX-License-Identifier: MIT
#include "device_calls.cuh"

const kvmeld_torch::device_calls& kvmeld_torch::half_calls() {
  static const device_kernels<gpu::half> calls{};
  return calls;
}
