/// What the CUDA tests need of their machine: on the emulator, or on a device where nvcc compiled
/// them.
#pragma once

#include <cstdint>
#include <new>

#include "kvfold/cuda/device/device.cuh"

namespace kvfold::cuda {

#ifdef __CUDACC__

/// Launches are synchronous (native_main.cpp says so), so any stream does; there is no order to
/// choose.
inline stream order(std::uint64_t = 1) { return nullptr; }

/// Memory that the host and the device both see.
inline unsigned char* both_sides(std::size_t bytes) {
  void* p = nullptr;
  detail::check(cudaMallocManaged(&p, bytes < 1 ? 1 : bytes), "cudaMallocManaged", __FILE__,
                __LINE__);
  return static_cast<unsigned char*>(p);
}
struct both_sides_release {
  void operator()(unsigned char* p) const { cudaFree(p); }
};

#else

/// The order in which threads and blocks run.
inline stream order(std::uint64_t seed = 1) { return {seed}; }

inline unsigned char* both_sides(std::size_t bytes) {
  return static_cast<unsigned char*>(::operator new[](bytes, std::align_val_t{16}));
}
struct both_sides_release {
  void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t{16}); }
};

#endif

}  // namespace kvfold::cuda
