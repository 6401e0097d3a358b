// The operators of a GPU on the emulator: torch.ops.kvfold_emulated takes CPU tensors.
#include <torch/library.h>

#include "device_operators.hpp"
#include "schema.hpp"

namespace kvfold_torch {

void* current_stream(c10::Device) { return nullptr; }

TORCH_LIBRARY(kvfold_emulated, m) { declare(m); }
TORCH_LIBRARY_IMPL(kvfold_emulated, CPU, m) { implement_on_device(m); }

}  // namespace kvfold_torch
