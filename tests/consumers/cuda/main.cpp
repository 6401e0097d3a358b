#include <cstdio>

#include "kvfold/cuda/error.cuh"
#include "kvfold/merge/merge_source.hpp"

#ifdef __CUDACC__  // kernels are nvcc's
#include "kvfold/cuda/step.cuh"
#endif

int main() {
  const kvfold::cuda_error error("cudaMalloc", 2, "out of memory", "main.cpp", 1);
  std::puts(error.what());
  return kvfold::merge_source{1} == kvfold::merge_source{1} ? 0 : 1;
}
