// SPDX-License-Identifier: MIT
/// What a launch moves of a cache's rows, as the emulator counts it.
#pragma once

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/memory/work_memory.cuh"

namespace kvmeld::cuda {

/// Rows of keys, values and queries, counted each for itself.
class row_traffic : public emulator::traffic {
 public:
  enum plane : std::size_t { keys, values, queries };

  explicit row_traffic(device_cache<half>& kv, device_buffer<half>* q = nullptr)
      : row_bytes_(2.0 * kv.shape.dim) {
    watch(kv.keys.data(), kv.keys.size() * sizeof(half));
    watch(kv.values.data(), kv.values.size() * sizeof(half));
    if (q != nullptr) {
      watch(q->data(), q->size() * sizeof(half));
    }
  }
  double loaded(plane x) const { return static_cast<double>(of(x).loaded.bytes) / row_bytes_; }
  double stored(plane x) const { return static_cast<double>(of(x).stored.bytes) / row_bytes_; }
  /// Sectors that rows touched, beside those that their bytes fill.
  double sectors(plane x) const {
    const auto bytes = of(x).loaded.bytes + of(x).stored.bytes;
    const auto touched = of(x).loaded.sectors + of(x).stored.sectors;
    return bytes == 0 ? 1.0 : static_cast<double>(32 * touched) / static_cast<double>(bytes);
  }

 private:
  double row_bytes_;
};

inline index_t ceiling(index_t n, index_t of) { return (n + of - 1) / of; }

/// Does a block attend a whole head, so that a step is one launch? Of rows of 16 bits.
inline bool in_one_launch(const cache_case& c) {
  return detail::splits_of(c.heads, c.capacity) == 1 && c.group <= 8 && c.dim <= 128;
}

}  // namespace kvmeld::cuda
