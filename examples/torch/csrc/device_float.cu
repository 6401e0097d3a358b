// SPDX-License-Identifier: MIT
// The operators' kernels for caches of float.
#include "device_calls.cuh"

kvmeld_torch::index_t kvmeld_torch::device_foresight_count(index_t queries, index_t count) {
  return kvmeld::cuda::foresight_count(queries, {.count = count});
}

template struct kvmeld_torch::device_calls<kvmeld::storage::f32>;
