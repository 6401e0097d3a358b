// SPDX-License-Identifier: MIT
/// Chance, the same on every machine.
#pragma once

#include <cstdint>

namespace kvmeld::cuda::emulator {

/// A small generator whose numbers are the same everywhere.
struct chance {
  std::uint64_t state;

  std::uint32_t below(std::uint32_t n) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::uint32_t>((state >> 33) % n);
  }
};

}  // namespace kvmeld::cuda::emulator
