// SPDX-License-Identifier: MIT
// The operators' kernels for caches of float.
#include "device_calls.cuh"

kvmeld_torch::index_t kvmeld_torch::device_lookahead_count(
    index_t queries, const kvmeld::lookahead_options& options) {
  return kvmeld::cuda::lookahead_count(queries, options);
}

template struct kvmeld_torch::device_calls<kvmeld::storage::f32>;
