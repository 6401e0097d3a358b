// SPDX-License-Identifier: MIT
/// How much memory a call takes at its height. The program links peak_memory.cpp.
#pragma once

#include <cstddef>

namespace bench {

/// Bytes allocated and not yet freed, and the most there have been. Not for several threads.
struct allocated {
  static std::size_t now, most;
};

/// The most bytes that `work` holds at once, beyond those held before.
template <class Work>
std::size_t peak_bytes(Work&& work) {
  const std::size_t before = allocated::most = allocated::now;
  work();
  return allocated::most - before;
}

}  // namespace bench
