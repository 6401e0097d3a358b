// SPDX-License-Identifier: MIT
/// torch.ops.kvmeld: what there is, on any device, and what a device's operators need of PyTorch.
#pragma once

#include <c10/core/Device.h>
#include <torch/library.h>

namespace kvmeld_torch {

/// The operators' schemas, and those that need no tensors.
void declare(torch::Library& m);

/// All that have kernels, on a GPU; the others refuse its tensors in words.
void implement_on_device(torch::Library& m);
/// The stream that PyTorch works on at present, a cudaStream_t.
void* current_stream(c10::Device device);
/// Is that stream captured in a CUDA graph?
bool is_capturing();

}  // namespace kvmeld_torch
