// SPDX-License-Identifier: MIT
/// What launches and blocks of the CUDA emulator find in device memory where a GPU overlaps them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cuda/device_memory.hpp"
#include "cuda/meeting.hpp"

namespace kvmeld::cuda::emulator {

/// Bytes of device memory that have changed, as they were and as they are.
class changes {
 public:
  changes() = default;
  /// Since then.
  explicit changes(const device_image& before) {
    for (const auto& [block, was] : before) {
      for (std::size_t i = 0; i < block.bytes; i += piece) {
        const std::size_t n = std::min(piece, block.bytes - i);
        if (std::memcmp(block.data + i, was.data() + i, n) != 0) {
          for (std::size_t b = i; b < i + n; ++b) {
            add(block.data + b, was[b]);
          }
        }
      }
    }
    std::sort(all_.begin(), all_.end(), [](const one& a, const one& b) { return a.at < b.at; });
  }

  /// Puts back what there was, and keeps what there is.
  void undo() {
    for (one& x : all_) {
      x.now = *x.at, *x.at = x.was;
    }
  }
  /// Puts back what there is. Throws where another value was written since `undo`.
  void redo() {
    bool written = false;
    for (const one& x : all_) {
      written = written || *x.at != x.was, *x.at = x.now;
    }
    if (written) {
      throw error(
          "global memory: written before the launch before, which writes it, was waited for");
    }
  }
  /// Is a byte among both?
  bool meets(const changes& other) const {
    auto b = other.all_.begin();
    return std::any_of(all_.begin(), all_.end(), [&](const one& a) {
      b = std::lower_bound(b, other.all_.end(), a,
                           [](const one& x, const one& y) { return x.at < y.at; });
      return b != other.all_.end() && b->at == a.at;
    });
  }

 private:
  static constexpr std::size_t piece = 64;  // compared at once
  struct one {
    unsigned char* at;
    unsigned char was, now;
  };

  void add(unsigned char* at, unsigned char was) {
    if (*at != was) {
      all_.push_back({at, was, *at});
    }
  }

  std::vector<one> all_;
};

/// While one lives, every block finds device memory as its launch found it, as if all began at
/// once: what a block reads of another is not there, and what two of them write is an error. Not
/// for kernels whose last block goes on with what the others wrote.
class simultaneous_blocks {
 public:
  simultaneous_blocks() { ++alive(); }
  simultaneous_blocks(const simultaneous_blocks&) = delete;
  ~simultaneous_blocks() { --alive(); }

  static int& alive() {
    thread_local int count = 0;
    return count;
  }
};

}  // namespace kvmeld::cuda::emulator
