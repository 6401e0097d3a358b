// SPDX-License-Identifier: MIT
// Where there is no nvcc: tensors on a GPU are refused in words.
#include <torch/library.h>

namespace kvmeld_torch {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.operator_name().name,
              ": expected tensors on the CPU (built without CUDA), got some on a GPU");
}

}  // namespace

TORCH_LIBRARY_IMPL(kvmeld, CUDA, m) {
  for (const char* name : {"compress", "shared_scores", "divide", "convert", "observe",
                           "observe_step", "step", "attend"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace kvmeld_torch
