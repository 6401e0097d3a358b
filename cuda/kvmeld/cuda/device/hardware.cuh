// SPDX-License-Identifier: MIT
/// The thin layer (`device.cuh`) on the hardware.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>  // std::is_same_v

#include "kvmeld/cuda/device/hardware_numbers.cuh"
#include "kvmeld/cuda/device/launch.cuh"
#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/search/rules.hpp"

namespace kvmeld::cuda {

inline constexpr unsigned all_lanes = 0xffffffffU;

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
  if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    if (width == 32) {
      return __reduce_add_sync(all_lanes, x);
    }
  }
  for (index_t d = width / 2; d > 0; d /= 2) {
    x += shuffle_xor(x, d);
  }
  return x;
}
template <class T>
__device__ T reduce_max(T x, index_t width = 32) {
  if constexpr (std::is_integral_v<T>) {
    if (width == 32) {
      if constexpr (sizeof(T) == 8) {  // the highest of the upper halves, then among its lanes
        static_assert(std::is_unsigned_v<T>);
        const auto upper = static_cast<unsigned>(x >> 32);
        const unsigned most = __reduce_max_sync(all_lanes, upper);
        const unsigned lower =
            __reduce_max_sync(all_lanes, upper == most ? static_cast<unsigned>(x) : 0U);
        return static_cast<T>(most) << 32 | lower;
      } else {
        return __reduce_max_sync(all_lanes, x);
      }
    }
  }
  for (index_t d = width / 2; d > 0; d /= 2) {
    const T y = shuffle_xor(x, d);
    x = y > x ? y : x;
  }
  return x;
}
__device__ inline index_t reduce_min(index_t x) { return __reduce_min_sync(all_lanes, x); }

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

/// Sixteen bytes as four registers.
template <class T>
__device__ vector_16<unsigned> load_words(const T* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  return {{raw.x, raw.y, raw.z, raw.w}};
}

/// `N` elements of the block's shared memory, aligned for vectors.
template <class T, index_t N>
struct alignas(16) shared_array {
  T data[N];

  __device__ T& operator[](index_t i) { return data[i]; }
  __device__ vector_16<T> vector(index_t i) const { return load_16(data + i); }
  __device__ void set_vector(index_t i, const vector_16<T>& x) { store_16(data + i, x); }
  __device__ unsigned pair(index_t i) const { return *reinterpret_cast<const unsigned*>(data + i); }
  __device__ vector_16<unsigned> words(index_t i) const { return load_words(data + i); }
};

/// The same shared memory, first as an `A`, then as a `B`.
template <class A, class B>
union shared_union {
  A first;
  B then;
};

/// Two 16-bit elements of global memory at a multiple of 4 bytes.
template <class T>
__device__ unsigned load_pair(const T* from) {
  static_assert(sizeof(T) == 2);
  return *reinterpret_cast<const unsigned*>(from);
}
template <class T>
__device__ unsigned pair_of(T a, T b) {
  const T both[2] = {a, b};
  unsigned x = 0;
  memcpy(&x, both, sizeof x);
  return x;
}
template <class T>
__device__ T low_of(unsigned x) {
  T both[2];
  memcpy(both, &x, sizeof x);
  return both[0];
}
template <class T>
__device__ T high_of(unsigned x) {
  return low_of<T>(x >> 16);
}
template <class T>
__device__ unsigned min_pairs(unsigned x, unsigned y) {
  static_assert(std::is_same_v<T, half>);
  __half2 a, b;
  memcpy(&a, &x, sizeof a), memcpy(&b, &y, sizeof b);
  a = __hmin2(a, b);
  memcpy(&x, &a, sizeof x);
  return x;
}
__device__ inline void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ inline void store_pair(float* to, float a, float b) {
  *reinterpret_cast<float2*>(to) = {a, b};
}

template <index_t N>
__device__ index_t add_shared(shared_array<index_t, N>& to, index_t i, index_t n) {
  return atomicAdd(&to.data[i], n);
}
__device__ inline index_t add_global(index_t* to, index_t n) { return atomicAdd(to, n); }

enum class reads { again, once };

template <class T, index_t N>
__device__ unsigned shared_address(const shared_array<T, N>& array, index_t i) {
  return static_cast<unsigned>(__cvta_generic_to_shared(array.data + i));
}
template <reads Reads = reads::again, class T, index_t N>
__device__ void copy_async(shared_array<T, N>& to, index_t i, const T* from, index_t bytes = 16) {
  if constexpr (Reads == reads::once) {
    unsigned long long evict_first = 0;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
    // The select keeps the address in its register: without it ptxas 12.4 to 13.0 make of some of
    // these an LDGSTS that has lost it, which a GPU refuses. tests/cuda/lost_registers looks for
    // it.
    asm volatile(
        "{ .reg .pred p; .reg .b32 a; setp.ge.s32 p, %2, 0; selp.b32 a, %0, 0, p;"
        "cp.async.cg.shared.global.L2::cache_hint [a], [%1], 16, %2, %3; }" ::"r"(
            shared_address(to, i)),
        "l"(from), "r"(bytes), "l"(evict_first)
        : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to, i)),
                 "l"(from), "r"(bytes)
                 : "memory");
  }
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

struct matrices {
  unsigned of[4];
};
template <class T, index_t N>
__device__ matrices load_matrices(const shared_array<T, N>& from, index_t i) {
  matrices x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.of[0]), "=r"(x.of[1]), "=r"(x.of[2]), "=r"(x.of[3])
               : "r"(shared_address(from, i))
               : "memory");
  return x;
}
template <class T, index_t N>
__device__ matrices load_matrices_transposed(const shared_array<T, N>& from, index_t i) {
  matrices x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.of[0]), "=r"(x.of[1]), "=r"(x.of[2]), "=r"(x.of[3])
               : "r"(shared_address(from, i))
               : "memory");
  return x;
}
__device__ inline unsigned transposed(unsigned x) {
  unsigned y = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace kvmeld::cuda
