// The operators' kernels for caches of bfloat16.
#include "device_calls.cuh"

template struct kvfold_torch::device_calls<kvfold::scalar_type::bfloat16>;
