// SPDX-License-Identifier: MIT
// The library's headers, and every policy that has a CUDA path, as nvcc hands them to the host's
// compiler: its front end writes anew what it has read.
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/full_cache.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "kvmeld/cuda/workspace.cuh"
#include "kvmeld/kvmeld.hpp"

namespace kvmeld::cuda {

template <class... Policies>
std::size_t bytes_of(const cache_view<KVMELD_SCALAR>& cache) {
  return (workspace_bytes(Policies{}, cache) + ...);
}

template std::size_t bytes_of<full_cache, streaming_llm, h2o, tova, snapkv, zsmerge, d2o, keepkv,
                              kvmerger, ems, fold>(const cache_view<KVMELD_SCALAR>&);

}  // namespace kvmeld::cuda
