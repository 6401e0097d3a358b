// SPDX-License-Identifier: MIT
#include <cstdio>

#include "kvmeld/cuda/error.cuh"
#include "kvmeld/merge/source.hpp"

#ifdef __CUDACC__  // kernels are nvcc's
#include "kvmeld/cuda/step.cuh"
#endif

int main() {
  const kvmeld::cuda_error error("cudaMalloc", 2, "out of memory", "main.cpp", 1);
  std::puts(error.what());
  return kvmeld::merge_source{1} == kvmeld::merge_source{1} ? 0 : 1;
}
