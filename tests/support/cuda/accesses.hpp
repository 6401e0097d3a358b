// SPDX-License-Identifier: MIT
/// Accesses of the CUDA emulator's threads, counted and checked.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/block.hpp"

namespace kvmeld::cuda::emulator {

/// An access of the thread that runs, for those who count.
inline void count(traffic::kind what, std::uintptr_t at, std::size_t bytes) {
  if (traffic::current != nullptr) {
    traffic::current->access(what, now().thread(), at, bytes);
  }
}
inline void count(traffic::kind what, const void* at, std::size_t bytes) {
  count(what, reinterpret_cast<std::uintptr_t>(at), bytes);
}

/// Of global memory.
inline void expect_aligned(const void* p, std::uintptr_t to) {
  if (reinterpret_cast<std::uintptr_t>(p) % to != 0) {
    now().fail("global memory: expected an address that is a multiple of " + std::to_string(to) +
               " bytes");
  }
}

}  // namespace kvmeld::cuda::emulator
