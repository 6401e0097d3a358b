// SPDX-License-Identifier: MIT
// The operators' kernels for caches of bfloat16.
#include "device_calls.cuh"

template struct kvmeld_torch::device_calls<kvmeld::storage::bf16>;
