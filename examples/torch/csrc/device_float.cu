// The operators' kernels for caches of float.
#include "device_calls.cuh"

kvfold_torch::index_t kvfold_torch::device_foresight_count(index_t queries, index_t count) {
  return kvfold::cuda::foresight_count(queries, {.count = count});
}

template struct kvfold_torch::device_calls<kvfold::scalar_type::float32>;
