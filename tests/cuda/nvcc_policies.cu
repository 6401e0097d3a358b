// The library's headers, and every policy that has a CUDA path, as nvcc hands them to the host's
// compiler on every commit: its front end writes anew what it has read.
#include "kvfold/cuda/policies/d2o.cuh"
#include "kvfold/cuda/policies/ems.cuh"
#include "kvfold/cuda/policies/fold.cuh"
#include "kvfold/cuda/policies/full_cache.cuh"
#include "kvfold/cuda/policies/h2o.cuh"
#include "kvfold/cuda/policies/keepkv.cuh"
#include "kvfold/cuda/policies/kvmerger.cuh"
#include "kvfold/cuda/policies/snapkv.cuh"
#include "kvfold/cuda/policies/streaming_llm.cuh"
#include "kvfold/cuda/policies/tova.cuh"
#include "kvfold/cuda/policies/zsmerge.cuh"
#include "kvfold/cuda/workspace.cuh"
#include "kvfold/kvfold.hpp"

namespace kvfold::cuda {

template <class... Policies>
std::size_t bytes_of(const cache_view<KVFOLD_SCALAR>& cache) {
  return (workspace_bytes(Policies{}, cache) + ...);
}

template std::size_t bytes_of<full_cache, streaming_llm, h2o, tova, snapkv, zsmerge, d2o, keepkv,
                              kvmerger, ems, fold>(const cache_view<KVFOLD_SCALAR>&);

}  // namespace kvfold::cuda
