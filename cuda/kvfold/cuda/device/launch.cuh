/// Launches on the hardware: part of the thin layer (`device.cuh`).
#pragma once

#include <cuda_runtime.h>

#include <type_traits>  // std::is_trivially_copyable_v

#include "kvfold/cuda/device/error.cuh"

namespace kvfold::cuda {

using stream = cudaStream_t;

struct extent {
  unsigned x = 1, y = 1, z = 1;
};

/// sm_80 knows neither: a launch begins there when the one before it has ended.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

namespace detail {

inline void check(cudaError_t code, const char* call, const char* file, int line) {
  if (code != cudaSuccess) {
    throw cuda_error(call, static_cast<int>(code), cudaGetErrorString(code), file, line);
  }
}

template <class Kernel>
constexpr unsigned resident_blocks() {
  if constexpr (requires { Kernel::resident; }) {
    return Kernel::resident;
  }
  return 0;
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, resident_blocks<Kernel>())
    run(const __grid_constant__ Kernel kernel) {
  extern __shared__ uint4 memory[];
  kernel(*reinterpret_cast<typename Kernel::shared_memory*>(memory));
}

inline bool starts_early() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute", __FILE__, __LINE__);
  return major >= 9;
}

template <class Kernel>
void launch_kernel(const Kernel& kernel, extent blocks, stream stream, bool early) {
  static_assert(std::is_trivially_copyable_v<Kernel> && Kernel::threads % 32 == 0);
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) {
    return;
  }
  constexpr std::size_t bytes = sizeof(typename Kernel::shared_memory);
  if constexpr (bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "cudaFuncSetAttribute", __FILE__, __LINE__);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks.x, blocks.y, blocks.z);
  config.blockDim = dim3(static_cast<unsigned>(Kernel::threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && starts_early() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, run<Kernel>, kernel), "launch", __FILE__, __LINE__);
}

}  // namespace detail

/// Runs `kernel` on every block of `blocks`, in the order of `stream`; an empty grid does nothing.
template <class Kernel>
void launch(const Kernel& kernel, extent blocks, stream stream) {
  detail::launch_kernel(kernel, blocks, stream, false);
}
/// ... which may begin before the launch before it in `stream` has ended.
template <class Kernel>
void launch_early(const Kernel& kernel, extent blocks, stream stream) {
  detail::launch_kernel(kernel, blocks, stream, true);
}

}  // namespace kvfold::cuda
