// SPDX-License-Identifier: MIT
/// What the operators on a GPU need of the framework's, beside its tensors.
#pragma once

#include <c10/core/Device.h>

namespace kvmeld_torch {

/// The stream that PyTorch works on at present, a cudaStream_t.
void* current_stream(c10::Device device);

}  // namespace kvmeld_torch
