// SPDX-License-Identifier: MIT
/// Numbers and elementary functions of the thin layer (`device.cuh`) on the hardware.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>  // std::is_same_v

#include "kvmeld/config.hpp"

namespace kvmeld::cuda {

using half = __half;
using bfloat16 = __nv_bfloat16;

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

__host__ __device__ inline float fp8_to_float(unsigned char x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}
__host__ __device__ inline unsigned char fp8_from_float(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3);
}

__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float square_root(float x) { return sqrtf(x); }
__device__ inline float inverse_square_root(float x) { return rsqrtf(x); }
__device__ inline double square_root(double x) { return sqrt(x); }
__device__ inline float cosine_pi(float x) { return cospif(x); }
__device__ inline float sine_pi(float x) { return sinpif(x); }
__device__ inline double power(double x, double y) { return pow(x, y); }
__device__ inline double nearest_integer(double x) { return rint(x); }

}  // namespace kvmeld::cuda
