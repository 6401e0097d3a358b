// SPDX-License-Identifier: MIT
// The operators' kernels for caches of float.
#include "device_calls.cuh"

kvmeld_torch::index_t kvmeld_torch::device_foresight_count(
    index_t queries, const kvmeld::foresight_options& options) {
  return kvmeld::cuda::foresight_count(queries, options);
}

template struct kvmeld_torch::device_calls<kvmeld::storage::f32>;
