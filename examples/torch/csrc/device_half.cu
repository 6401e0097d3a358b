// SPDX-License-Identifier: MIT
// The operators' kernels for caches of half.
#include "device_calls.cuh"

template struct kvmeld_torch::device_calls<kvmeld::storage::f16>;
