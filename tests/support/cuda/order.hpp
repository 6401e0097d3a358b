// SPDX-License-Identifier: MIT
/// What the CUDA tests need of their machine: on the emulator, or on a device where nvcc compiled
/// them.
#pragma once

#include <cstdint>

#include "cuda/two_sides.hpp"

namespace kvmeld::cuda {

/// The stream of the next call, which gets what the host has written. On the emulator: in which
/// threads and blocks run in an order of its own.
inline stream order([[maybe_unused]] std::uint64_t seed = 1) {
  two_sides::before_call();
#ifdef __CUDACC__
  return nullptr;
#else
  return {seed};
#endif
}

}  // namespace kvmeld::cuda
