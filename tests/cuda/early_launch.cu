// SPDX-License-Identifier: MIT
// Which launches begin early, by the architecture that a kernel was compiled for. Linked with a
// runtime of its own, so that it needs no GPU: the runtime says that the code is PTX of sm_80.
#include <cstdio>

#include "kvmeld/cuda/device/device.cuh"

namespace early_launch {

struct nothing {
  static constexpr int threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  KVMELD_DEVICE void operator()(shared_memory&) const { kvmeld::cuda::wait_for_previous(); }
};
struct nothing_else : nothing {};

}  // namespace early_launch

namespace {

using early_launch::nothing, early_launch::nothing_else;

int ptx_version = 80, attributes = -1, queries = 0;

bool begins_early(bool expected, int version) {
  ptx_version = version, attributes = -1;
  version == 80 ? kvmeld::cuda::launch_early(nothing{}, {}, nullptr)
                : kvmeld::cuda::launch_early(nothing_else{}, {}, nullptr);
  if (attributes != static_cast<int>(expected)) {
    std::printf("PTX %d: expected %d attributes of a launch, got %d\n", version, expected,
                attributes);
  }
  return attributes == static_cast<int>(expected);
}

}  // namespace

// The runtime, by its symbols: nvcc has bodies of its own for some of the names.
extern "C" {

cudaError_t get_device(int*) __asm__("cudaGetDevice");
cudaError_t get_device(int* device) { return *device = 0, cudaSuccess; }
cudaError_t get_attributes(cudaFuncAttributes*, const void*) __asm__("cudaFuncGetAttributes");
cudaError_t get_attributes(cudaFuncAttributes* to, const void*) {
  ++queries;
  return to->ptxVersion = ptx_version, cudaSuccess;
}
const char* get_text(cudaError_t) __asm__("cudaGetErrorString");
const char* get_text(cudaError_t) { return ""; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void*, void**) {
  return attributes = static_cast<int>(launch->numAttrs), cudaSuccess;
}
// What nvcc's own code calls.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {}
}

int main() {
  const bool right = begins_early(false, 80) && begins_early(true, 90) && begins_early(true, 120);
  return right && queries == 2 ? 0 : 1;
}
