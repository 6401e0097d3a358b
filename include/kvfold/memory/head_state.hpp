/// What a policy remembers of each slot of a head.
#pragma once

#include <Eigen/Core>  // Eigen::aligned_allocator
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t
#include <span>
#include <vector>

#include "kvfold/memory/column_merge.hpp"

namespace kvfold {

/// One float per slot: how it merges, and what a fresh slot has.
struct column {
  column_merge fold = column_merge::sum;
  float initial = 0;
};

/// Per-head state of a policy: columns of one float per slot, which move with the slots, and a flat
/// block of floats that does not. Being plain numbers it can be saved and restored.
class head_state {
 public:
  head_state(std::span<const kvfold::column> kinds, std::size_t memory, index_t capacity)
      : kinds_(kinds.begin(), kinds.end()),
        columns_(kinds.size() * static_cast<std::size_t>(capacity)),
        memory_(memory),
        capacity_(capacity) {}

  /// Slots that have numbers; those appended since get theirs from `extend`.
  index_t length() const { return length_; }
  index_t columns() const { return static_cast<index_t>(kinds_.size()); }
  column_merge fold(index_t c) const { return kinds_[static_cast<std::size_t>(c)].fold; }

  /// Column `c` `[length]`.
  std::span<float> column(index_t c) {
    return std::span(columns_).subspan(offset(c), static_cast<std::size_t>(length_));
  }
  std::span<const float> column(index_t c) const {
    return std::span(columns_).subspan(offset(c), static_cast<std::size_t>(length_));
  }
  std::span<float> memory() { return memory_; }
  std::span<const float> memory() const { return memory_; }

  /// Initial numbers for the slots appended since the last call.
  void extend(index_t length) {
    expects(length <= capacity_, "state: made for ", capacity_, " slots, ", length, " came");
    for (index_t c = 0; c < columns(); ++c) {
      for (index_t s = length_; s < length; ++s) {
        columns_[offset(c) + static_cast<std::size_t>(s)] =
            kinds_[static_cast<std::size_t>(c)].initial;
      }
    }
    length_ = length;
  }
  void truncate(index_t length) { length_ = length; }

  /// Queries observed so far.
  std::int64_t observed() const { return observed_; }
  void count_queries(std::int64_t n) { observed_ += n; }

  /// Bytes for the slots in use.
  std::size_t bytes() const {
    return sizeof(float) * (kinds_.size() * static_cast<std::size_t>(length_) + memory_.size());
  }
  index_t capacity() const { return capacity_; }

 private:
  std::size_t offset(index_t c) const {
    return static_cast<std::size_t>(c) * static_cast<std::size_t>(capacity_);
  }

  std::vector<kvfold::column> kinds_;
  std::vector<float> columns_;  // [columns, capacity]
  // Aligned, so that sums over it do not depend on where it happens to lie.
  std::vector<float, Eigen::aligned_allocator<float>> memory_;
  index_t capacity_;
  index_t length_ = 0;
  std::int64_t observed_ = 0;
};

}  // namespace kvfold
