/// The thin layer (`device.cuh`) on the hardware.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>  // std::is_trivially_copyable_v

#include "kvfold/cuda/device/error.cuh"
#include "kvfold/detail/multiply_add.hpp"
#include "kvfold/memory/column_merge.hpp"
#include "kvfold/score/accumulated.hpp"
#include "kvfold/search/protection.hpp"

namespace kvfold::cuda {

using half = __half;
using bfloat16 = __nv_bfloat16;
using stream = cudaStream_t;

inline constexpr unsigned all_lanes = 0xffffffffU;

struct extent {
  unsigned x = 1, y = 1, z = 1;
};

// ---------------------------------------------------------------------------- places

__device__ inline index_t thread_index() { return static_cast<index_t>(threadIdx.x); }
__device__ inline index_t lane() { return static_cast<index_t>(threadIdx.x % 32); }
__device__ inline index_t warp() { return static_cast<index_t>(threadIdx.x / 32); }
__device__ inline extent block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
__device__ inline extent grid() { return {gridDim.x, gridDim.y, gridDim.z}; }

// ---------------------------------------------------------------------------- together

__device__ inline void sync_block() { __syncthreads(); }
__device__ inline void sync_warp(unsigned mask = all_lanes) { __syncwarp(mask); }
__device__ inline void thread_fence() { __threadfence(); }

template <class T>
__device__ T shuffle(T x, index_t from, unsigned mask = all_lanes) {
  return __shfl_sync(mask, x, from);
}
template <class T>
__device__ T shuffle_xor(T x, index_t distance, unsigned mask = all_lanes) {
  return __shfl_xor_sync(mask, x, distance);
}
__device__ inline unsigned ballot(bool yes, unsigned mask = all_lanes) {
  return __ballot_sync(mask, yes);
}

__device__ inline unsigned equal_lanes(index_t x, unsigned mask = all_lanes) {
  return __match_any_sync(mask, x);
}

__device__ inline index_t lowest_lane(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }
__device__ inline index_t count_lanes(unsigned lanes) { return __popc(lanes); }

template <class T>
__device__ T reduce_sum(T x, index_t width = 32) {
  for (index_t d = width / 2; d > 0; d /= 2) {
    x += shuffle_xor(x, d);
  }
  return x;
}
template <class T>
__device__ T reduce_max(T x, index_t width = 32) {
  for (index_t d = width / 2; d > 0; d /= 2) {
    const T y = shuffle_xor(x, d);
    x = y > x ? y : x;
  }
  return x;
}

// ---------------------------------------------------------------------------- memory

/// Sixteen bytes, as one access moves them.
template <class T>
struct alignas(16) vector_16 {
  static constexpr index_t size = static_cast<index_t>(16 / sizeof(T));
  T data[size];

  __device__ T& operator[](index_t i) { return data[i]; }
  __device__ const T& operator[](index_t i) const { return data[i]; }
};

template <class T>
__device__ vector_16<T> load_16(const T* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  vector_16<T> x;
  memcpy(&x, &raw, sizeof x);
  return x;
}
template <class T>
__device__ void store_16(T* to, const vector_16<T>& x) {
  uint4 raw;
  memcpy(&raw, &x, sizeof x);
  *reinterpret_cast<uint4*>(to) = raw;
}

/// `N` elements of the block's shared memory, aligned for vectors.
template <class T, index_t N>
struct alignas(16) shared_array {
  T data[N];

  __device__ T& operator[](index_t i) { return data[i]; }
  __device__ vector_16<T> vector(index_t i) const { return load_16(data + i); }
  __device__ void set_vector(index_t i, const vector_16<T>& x) { store_16(data + i, x); }
  __device__ unsigned pair(index_t i) const { return *reinterpret_cast<const unsigned*>(data + i); }
};

template <index_t N>
__device__ index_t add_shared(shared_array<index_t, N>& to, index_t i, index_t n) {
  return atomicAdd(&to.data[i], n);
}
__device__ inline index_t add_global(index_t* to, index_t n) { return atomicAdd(to, n); }

template <class T, index_t N>
__device__ void copy_async(shared_array<T, N>& to, index_t i, const T* from, index_t bytes = 16) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to.data + i));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <index_t Groups>
__device__ void wait_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// ---------------------------------------------------------------------------- tensor cores

template <class T>
__device__ void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (std::is_same_v<T, half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// ---------------------------------------------------------------------------- numbers

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(half x) { return __half2float(x); }
__host__ __device__ inline float to_float(bfloat16 x) { return __bfloat162float(x); }

template <class T>
__host__ __device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float square_root(float x) { return sqrtf(x); }
__device__ inline double square_root(double x) { return sqrt(x); }
__device__ inline float cosine(float x) { return cosf(x); }
__device__ inline float sine(float x) { return sinf(x); }
__device__ inline double power(double x, double y) { return pow(x, y); }
__device__ inline double nearest_integer(double x) { return rint(x); }

// ---------------------------------------------------------------------------- launch

namespace detail {

inline void check(cudaError_t code, const char* call, const char* file, int line) {
  if (code != cudaSuccess) {
    throw cuda_error(call, static_cast<int>(code), cudaGetErrorString(code), file, line);
  }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads) run(const __grid_constant__ Kernel kernel) {
  extern __shared__ uint4 memory[];
  kernel(*reinterpret_cast<typename Kernel::shared_memory*>(memory));
}

}  // namespace detail

/// Runs `kernel` on every block of `blocks`, in the order of `stream`; an empty grid does nothing.
template <class Kernel>
void launch(const Kernel& kernel, extent blocks, stream stream) {
  static_assert(std::is_trivially_copyable_v<Kernel> && Kernel::threads % 32 == 0);
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) {
    return;
  }
  constexpr std::size_t bytes = sizeof(typename Kernel::shared_memory);
  if constexpr (bytes > 48 * 1024) {
    detail::check(
        cudaFuncSetAttribute(detail::run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute", __FILE__, __LINE__);
  }
  detail::run<Kernel>
      <<<dim3(blocks.x, blocks.y, blocks.z), Kernel::threads, bytes, stream>>>(kernel);
  detail::check(cudaGetLastError(), "launch", __FILE__, __LINE__);
}

}  // namespace kvfold::cuda
