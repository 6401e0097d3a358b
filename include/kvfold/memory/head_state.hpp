/// What a policy remembers of each slot of a head.
#pragma once

#include <Eigen/Core>  // Eigen::aligned_allocator
#include <algorithm>   // std::copy_n
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvfold/memory/column_merge.hpp"

namespace kvfold {
inline namespace v0 {

/// One float per slot: how it merges, and what a fresh slot has.
struct column {
  column_merge fold = column_merge::sum;
  float initial = 0;

  bool operator==(const column&) const = default;
};

/// Per-head state of a policy: columns of one float per slot, which move with the slots, and a flat
/// block of floats that does not. Being plain numbers it can be saved and restored.
class head_state {
 public:
  /// `policy`: the name of the one that it is for; a state for none only follows plans.
  head_state(std::span<const kvfold::column> kinds, std::size_t memory, index_t capacity,
             std::string_view policy = {})
      : policy_(policy),
        kinds_(kinds.begin(), kinds.end()),
        columns_(kinds.size() * static_cast<std::size_t>(capacity)),
        memory_(memory),
        capacity_(capacity),
        memory_capacity_(capacity) {}

  /// The name of the policy that it was made for.
  std::string_view policy() const { return policy_; }

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
  /// Slots that there are numbers for.
  index_t capacity() const { return capacity_; }
  /// The capacity that `memory` was laid out for: `shrink` does not change it.
  index_t memory_capacity() const { return memory_capacity_; }

  /// As `make_head_state` makes it: no slots, no queries, all memory 0.
  void clear() {
    std::ranges::fill(memory_, 0.0F);
    length_ = 0;
    observed_ = 0;
  }
  /// Copies all numbers of `from`, without allocation. Refused, with nothing changed: another
  /// policy's, memory of another size or layout, more slots than there is room for.
  void copy(const head_state& from) {
    expects(policy_ == from.policy_, "copy: a state for ", policy_, " expected, one for ",
            from.policy_, " came");
    expects(kinds_ == from.kinds_ && memory_.size() == from.memory_.size() &&
                memory_capacity_ == from.memory_capacity_,
            "copy: a state of ", columns(), " columns and ", memory_.size(), " floats for ",
            memory_capacity_, " slots expected, one of ", from.columns(), " and ",
            from.memory_.size(), " for ", from.memory_capacity_, " came");
    expects(errc::no_capacity, from.length_ <= capacity_, "copy: a state for at least ",
            from.length_, " slots expected, ", capacity_, " came");
    for (index_t c = 0; c < columns(); ++c) {
      std::copy_n(from.columns_.data() + from.offset(c), from.length_, columns_.data() + offset(c));
    }
    std::ranges::copy(from.memory_, memory_.begin());
    length_ = from.length_;
    observed_ = from.observed_;
  }
  /// Gives columns beyond `capacity` slots back; `memory` is unchanged.
  void shrink(index_t capacity) {
    expects(capacity >= length_ && capacity <= capacity_, "shrink: a capacity of ", length_, " to ",
            capacity_, " slots expected, ", capacity, " came");
    std::vector<float> smaller(kinds_.size() * static_cast<std::size_t>(capacity));
    for (index_t c = 0; c < columns(); ++c) {
      std::copy_n(columns_.data() + offset(c), length_,
                  smaller.data() + std::ptrdiff_t{c} * capacity);
    }
    columns_ = std::move(smaller);
    capacity_ = capacity;
  }

 private:
  std::size_t offset(index_t c) const {
    return static_cast<std::size_t>(c) * static_cast<std::size_t>(capacity_);
  }

  std::string policy_;
  std::vector<kvfold::column> kinds_;
  std::vector<float> columns_;  // [columns, capacity]
  // Aligned, so that sums over it do not depend on where it happens to lie.
  std::vector<float, Eigen::aligned_allocator<float>> memory_;
  index_t capacity_, memory_capacity_;
  index_t length_ = 0;
  std::int64_t observed_ = 0;
};

}  // namespace v0
}  // namespace kvfold
