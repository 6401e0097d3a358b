// The operators' kernels for caches of half.
#include "device_calls.cuh"

template struct kvfold_torch::device_calls<kvfold::scalar_type::half>;
