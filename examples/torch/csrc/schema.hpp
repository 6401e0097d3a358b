// SPDX-License-Identifier: MIT
/// torch.ops.kvmeld: what there is, on any device.
#pragma once

#include <torch/library.h>

namespace kvmeld_torch {

/// The operators' schemas, and those that need no tensors.
void declare(torch::Library& m);

/// All that have kernels, on a GPU; the others refuse its tensors in words.
void implement_on_device(torch::Library& m);

}  // namespace kvmeld_torch
