// SPDX-License-Identifier: MIT
// CUDA tensors, where the extension is built with nvcc.
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "schema.hpp"

namespace kvmeld_torch {

void* current_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}
bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

TORCH_LIBRARY_IMPL(kvmeld, CUDA, m) { implement_on_device(m); }

}  // namespace kvmeld_torch
