// SPDX-License-Identifier: MIT
// The operators of a GPU on the emulator: torch.ops.kvmeld_emulated takes CPU tensors.
#include <torch/library.h>

#include "schema.hpp"

namespace kvmeld_torch {

void* current_stream(c10::Device) { return nullptr; }
bool is_capturing() { return false; }

TORCH_LIBRARY(kvmeld_emulated, m) { declare(m); }
TORCH_LIBRARY_IMPL(kvmeld_emulated, CPU, m) { implement_on_device(m); }

}  // namespace kvmeld_torch
