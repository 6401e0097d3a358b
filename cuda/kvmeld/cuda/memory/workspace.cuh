// SPDX-License-Identifier: MIT
/// Device memory that calls work in: the same code sizes and allocates it.
#pragma once

#include <cstddef>  // std::size_t

#include "kvmeld/config.hpp"

namespace kvmeld::cuda {

/// The caller's memory. Calls allocate from its beginning; what it holds before and after a call
/// means nothing. Calls on one stream may share it.
struct workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Gives out pieces one after another, each at a multiple of 256 bytes; without memory it counts.
class workspace_allocator {
 public:
  workspace_allocator() = default;  ///< counts
  explicit workspace_allocator(workspace memory) : memory_(memory) {}

  template <class T>
  T* take(std::size_t count) {
    const std::size_t begin = (used_ + 255) / 256 * 256;
    used_ = begin + count * sizeof(T);
    return memory_.data == nullptr ? nullptr
                                   : reinterpret_cast<T*>(static_cast<char*>(memory_.data) + begin);
  }

  std::size_t used() const { return used_; }
  /// What was allocated elsewhere from the same memory counts too.
  void reserve(std::size_t used) { used_ = used > used_ ? used : used_; }

  /// Refuses memory that was too small for what was taken; `sized_by` says how much it needs.
  void check(const char* what, const char* sized_by = "workspace_bytes") const {
    expects(used_ <= (memory_.data == nullptr ? 0 : memory_.bytes), what,
            ": expected a workspace of ", used_, " bytes (", sized_by, "), got ",
            memory_.data == nullptr ? 0 : memory_.bytes);
  }

 private:
  workspace memory_;
  std::size_t used_ = 0;
};

}  // namespace kvmeld::cuda
