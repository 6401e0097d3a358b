// SPDX-License-Identifier: MIT
/// Device memory of the CUDA emulator: heap blocks that are there for kernels alone. Under
/// AddressSanitizer a host that reads or writes them, but for copies, is seen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "cuda/fibers.hpp"

namespace kvmeld::cuda::emulator {

struct device_block {
  unsigned char* data;
  std::size_t bytes;
};
inline std::vector<device_block>& device_blocks() {
  thread_local std::vector<device_block> all;
  return all;
}

/// Contents of device memory.
using device_image = std::vector<std::pair<device_block, std::vector<unsigned char>>>;
inline device_image image() {
  device_image all;
  for (const device_block& x : device_blocks()) {
    all.emplace_back(x, std::vector<unsigned char>(x.data, x.data + x.bytes));
  }
  return all;
}
/// Before the launches that the next one may overlap: none when the host has touched device memory.
inline device_image& overlapped() {
  thread_local device_image before;
  return before;
}

/// While one lives, a launch or a copy runs, and device memory may be touched.
class device_open {
 public:
  device_open() {
#ifdef KVMELD_FIBERS_ASAN
    for (const device_block& x : device_blocks()) {
      ASAN_UNPOISON_MEMORY_REGION(x.data, x.bytes);
    }
#endif
  }
  device_open(const device_open&) = delete;
  ~device_open() {
#ifdef KVMELD_FIBERS_ASAN
    for (const device_block& x : device_blocks()) {
      ASAN_POISON_MEMORY_REGION(x.data, x.bytes);
    }
#endif
  }
};

inline unsigned char* allocate(std::size_t bytes) {
  const device_open now;
  overlapped().clear();
  auto* const p = static_cast<unsigned char*>(::operator new[](bytes, std::align_val_t{16}));
  device_blocks().push_back({p, bytes});
  return p;
}
inline void release(unsigned char* p) {
  const device_open now;
  overlapped().clear();
  auto& all = device_blocks();
  all.erase(std::find_if(all.begin(), all.end(), [p](const auto& x) { return x.data == p; }));
  ::operator delete[](p, std::align_val_t{16});
}
inline void copy(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  const device_open now;
  overlapped().clear();
  std::copy_n(from, bytes, to);
}
inline void fill(unsigned char* to, int byte, std::size_t bytes) {
  const device_open now;
  overlapped().clear();
  std::fill_n(to, bytes, static_cast<unsigned char>(byte));
}

}  // namespace kvmeld::cuda::emulator
