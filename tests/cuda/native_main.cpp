// SPDX-License-Identifier: MIT
// The main of the CUDA tests as nvcc compiles them: without a device they are skipped, which 77
// says.
#define CATCH_CONFIG_RUNNER
#include <cuda_runtime.h>

#include <catch2/catch.hpp>
#include <cstdio>

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  cudaDeviceProp card{};
  cudaGetDeviceProperties(&card, 0);
  std::printf("on %s\n", card.name);
  return Catch::Session().run(argc, argv);
}
