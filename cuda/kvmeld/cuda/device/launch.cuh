// SPDX-License-Identifier: MIT
/// Launches on the hardware: part of the thin layer (`device.cuh`).
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>  // std::is_trivially_copyable_v

#include "kvmeld/cuda/device/error.cuh"

namespace kvmeld::cuda {

using stream = cudaStream_t;
using event = cudaEvent_t;

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

/// Bytes of shared memory that a block has on every card: sm_86, sm_89 and sm_120 give no more.
inline constexpr std::size_t shared_of_every_card = 99 * 1024;

/// Does a kernel say that it takes more, and is launched where it `fits` alone?
template <class Kernel>
constexpr bool is_roomy() {
  if constexpr (requires { Kernel::roomy; }) {
    return Kernel::roomy;
  }
  return false;
}

template <class Part>
__device__ bool is_idle(const Part& part);  // idle.cuh

template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, resident_blocks<Kernel>())
    run(const __grid_constant__ Kernel kernel) {
  extern __shared__ uint4 memory[];
  if (is_idle(kernel)) {
    return wait_for_previous();
  }
  kernel(*reinterpret_cast<typename Kernel::shared_memory*>(memory));
}

inline int attribute_of_device(cudaDeviceAttr which) {
  int device = 0, x = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  check(cudaDeviceGetAttribute(&x, which, device), "cudaDeviceGetAttribute", __FILE__, __LINE__);
  return x;
}

/// Does the code of `Kernel` that the device runs wait for the launch before it? PTX of sm_80 does
/// not, though an H100 compiles it and would start it early. Queried once per device.
template <class Kernel>
bool waits_for_launch() {
  static std::atomic<int> known[16] = {};  // by device: 0, then 1 more than the architecture
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  const auto query = [] {
    cudaFuncAttributes code{};
    check(cudaFuncGetAttributes(&code, run<Kernel>), "cudaFuncGetAttributes", __FILE__, __LINE__);
    return code.ptxVersion + 1;
  };
  if (device >= 16) {
    return query() > 90;
  }
  if (known[device] == 0) {
    known[device] = query();
  }
  return known[device] > 90;
}

template <class Kernel>
void launch_kernel(const Kernel& kernel, extent blocks, stream stream, bool early) {
  static_assert(std::is_trivially_copyable_v<Kernel> && Kernel::threads % 32 == 0);
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) {
    return;
  }
  constexpr std::size_t bytes = sizeof(typename Kernel::shared_memory);
  static_assert(
      (bytes > shared_of_every_card) == is_roomy<Kernel>(),
      "kvmeld::cuda: expected a kernel that every GPU can launch, or a smaller one in addition");
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
  config.numAttrs = early && waits_for_launch<Kernel>() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, run<Kernel>, kernel), "launch", __FILE__, __LINE__);
}

}  // namespace detail

/// Does the device give a block the shared memory of a kernel that is `roomy`?
template <class Kernel>
bool fits() {
  return sizeof(typename Kernel::shared_memory) <=
         static_cast<std::size_t>(
             detail::attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

/// Blocks of so many bytes of shared memory that the device runs at once, at least one.
inline int blocks_at_once(std::size_t shared) {
  const int of_processor =
      detail::attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
      static_cast<int>(shared + 1024);
  const int processors = detail::attribute_of_device(cudaDevAttrMultiProcessorCount);
  return processors * (of_processor > 1 ? of_processor : 1);
}

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

/// Copies to pinned memory in the order of `stream`, and records `done` after it.
template <class T>
void copy_to_host(T* host, const T* device, std::size_t count, event done, stream stream) {
  detail::check(cudaMemcpyAsync(host, device, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
                "cudaMemcpyAsync", __FILE__, __LINE__);
  detail::check(cudaEventRecord(done, stream), "cudaEventRecord", __FILE__, __LINE__);
}
/// Has all that was launched before `done` ended? Does not wait.
inline bool is_done(event done) {
  const cudaError_t code = cudaEventQuery(done);
  if (code != cudaErrorNotReady) {
    detail::check(code, "cudaEventQuery", __FILE__, __LINE__);
  }
  return code == cudaSuccess;
}

}  // namespace kvmeld::cuda
