// SPDX-License-Identifier: MIT
/// What a policy remembers of each slot of a head.
#pragma once

#include <Eigen/Core>  // Eigen::aligned_allocator
#include <algorithm>   // std::copy_n
#include <span>
#include <string>
#include <string_view>
#include <utility>  // std::exchange, std::swap
#include <vector>

#include "kvmeld/memory/slot_stat.hpp"

namespace kvmeld::inline v0 {

/// A head's state in memory of the caller's, as where an engine's allocator holds all. It is as a
/// `head_state` left it; for a head without tokens: 0 in all of `memory`.
struct state_memory {
  std::span<float> columns;     ///< [columns, capacity]
  std::span<float> memory;      ///< the policy's, aligned as vectors are
  index_t capacity = 0;         ///< slots
  index_t memory_capacity = 0;  ///< the capacity that `memory` was laid out for; 0: `capacity`
  index_t length = 0;           ///< slots that have numbers
  std::int64_t queries = 0;     ///< observed so far
  bool memory_follows_capacity = true;  ///< does the layout of `memory` depend on its capacity?
};

namespace detail {

/// What a `head_state` is made of; a value that may be moved out of it whole.
class state_fields {
 protected:
  std::string policy_;
  std::vector<slot_stat> kinds_;
  // Empty where the numbers are the caller's. `own_memory_` is aligned, so that sums over it do not
  // depend on where it happens to lie.
  std::vector<float> own_columns_;
  std::vector<float, Eigen::aligned_allocator<float>> own_memory_;
  std::span<float> columns_;  // [columns, capacity]
  std::span<float> memory_;
  index_t capacity_ = 0, memory_capacity_ = 0;
  bool memory_follows_capacity_ = true;
  index_t length_ = 0;
  std::int64_t observed_ = 0;
};

}  // namespace detail

/// Per-head state of a policy: columns of one float per slot, which move with the slots, and a flat
/// block of floats that does not. Being plain numbers it can be saved and restored.
class head_state : private detail::state_fields {
 public:
  /// `policy`: the name of the one that it is for; a state for none only follows plans.
  /// `memory_follows_capacity`: does the layout of the memory depend on the capacity?
  head_state(std::span<const slot_stat> kinds, std::size_t memory, index_t capacity,
             std::string_view policy = {}, bool memory_follows_capacity = true) {
    policy_ = policy, kinds_.assign(kinds.begin(), kinds.end());
    own_columns_.resize(kinds.size() * as_size(capacity)), own_memory_.resize(memory);
    columns_ = own_columns_, memory_ = own_memory_;
    capacity_ = memory_capacity_ = capacity;
    memory_follows_capacity_ = memory_follows_capacity;
  }

  /// The same over the caller's memory, which must live as long. Refused: columns of another size,
  /// a length beyond the capacity, less than no queries.
  head_state(std::span<const slot_stat> kinds, const state_memory& over, std::string_view policy) {
    policy_ = policy, kinds_.assign(kinds.begin(), kinds.end());
    columns_ = over.columns, memory_ = over.memory;
    capacity_ = over.capacity;
    memory_capacity_ = over.memory_capacity == 0 ? over.capacity : over.memory_capacity;
    memory_follows_capacity_ = over.memory_follows_capacity;
    length_ = over.length, observed_ = over.queries;
    const std::size_t wanted = kinds.size() * as_size(capacity_);
    expects(columns_.size() == wanted, "state: expected columns [", kinds.size(), ", ", capacity_,
            "], got ", columns_.size(), " floats");
    expects(length_ >= 0 && length_ <= capacity_, "state: expected 0 to ", capacity_,
            " slots, got ", length_);
    expects(observed_ >= 0, "state: expected at least 0 queries, got ", observed_);
  }

  /// A copy owns its numbers, whether or not `from` owns its own.
  head_state(const head_state& from) : state_fields(from) {
    own_columns_.assign(from.columns_.begin(), from.columns_.end());
    own_memory_.assign(from.memory_.begin(), from.memory_.end());
    columns_ = own_columns_, memory_ = own_memory_;
  }
  /// What was moved from has no slots, no columns and no memory: spans that stayed behind would
  /// write into the state that was moved to.
  head_state(head_state&& from) noexcept
      : state_fields(std::exchange(static_cast<state_fields&>(from), {})) {}
  head_state& operator=(head_state from) noexcept {
    std::swap(static_cast<state_fields&>(*this), static_cast<state_fields&>(from));
    return *this;
  }
  ~head_state() = default;

  /// The name of the policy that it was made for.
  std::string_view policy() const { return policy_; }

  /// Slots that have numbers; those appended since get theirs from `extend`.
  index_t length() const { return length_; }
  index_t slot_stats() const { return static_cast<index_t>(kinds_.size()); }
  /// What each of them is.
  std::span<const slot_stat> kinds() const { return kinds_; }
  slot_reduce reduce(index_t c) const { return kinds_[as_size(c)].reduce; }

  /// Column `c` `[length]`.
  std::span<float> column(index_t c) { return columns_.subspan(offset(c), as_size(length_)); }
  std::span<const float> column(index_t c) const {
    return columns_.subspan(offset(c), as_size(length_));
  }
  std::span<float> memory() { return memory_; }
  std::span<const float> memory() const { return memory_; }

  /// Throws unless there are numbers for `length` slots.
  void expect_capacity(index_t length) const {
    expects(length <= capacity_, "state: expected at most ", capacity_, " slots, got ", length);
  }
  /// Initial numbers for the slots appended since the last call.
  void extend(index_t length) {
    expect_capacity(length);
    for (index_t c = 0; c < slot_stats(); ++c) {
      for (index_t s = length_; s < length; ++s) {
        columns_[offset(c) + as_size(s)] = kinds_[as_size(c)].initial;
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
    return sizeof(float) * (kinds_.size() * as_size(length_) + memory_.size());
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
  /// Throws where `copy` would.
  void expect_copy(const head_state& from) const {
    expects(policy_ == from.policy_, "copy: expected a state for ", policy(), ", got one for ",
            from.policy());
    const bool follows = memory_follows_capacity_ && !memory_.empty();
    expects(!follows || memory_capacity_ == from.memory_capacity_,
            "copy: expected a state whose memory is laid out for ", memory_capacity_,
            " slots, got one for ", from.memory_capacity_, ": the memory of ", policy(),
            " depends on the capacity");
    expects(kinds_ == from.kinds_ && memory_.size() == from.memory_.size(),
            "copy: expected a state of ", slot_stats(), " columns and ", memory_.size(),
            " floats, got one of ", from.slot_stats(), " and ", from.memory_.size());
    expects(errc::no_capacity, from.length_ <= capacity_, "copy: expected a state for at least ",
            from.length_, " slots, got ", capacity_);
  }
  /// Copies all numbers of `from`, without allocation. The capacities may differ, unless the layout
  /// of the policy's memory depends on them. Refused, with nothing changed: another policy's,
  /// memory of another size or layout, more slots than there is room for.
  void copy(const head_state& from) {
    expect_copy(from);
    for (index_t c = 0; c < slot_stats(); ++c) {
      std::copy_n(from.columns_.data() + from.offset(c), from.length_, columns_.data() + offset(c));
    }
    std::ranges::copy(from.memory_, memory_.begin());
    length_ = from.length_;
    observed_ = from.observed_;
  }
  /// Gives columns beyond `capacity` slots back; `memory` is unchanged. Columns over the caller's
  /// memory become the state's own.
  void shrink(index_t capacity) {
    expects(capacity >= length_ && capacity <= capacity_, "shrink: expected a capacity of ",
            length_, " to ", capacity_, " slots, got ", capacity);
    std::vector<float> smaller(kinds_.size() * as_size(capacity));
    for (index_t c = 0; c < slot_stats(); ++c) {
      std::copy_n(columns_.data() + offset(c), length_,
                  smaller.data() + std::ptrdiff_t{c} * capacity);
    }
    own_columns_ = std::move(smaller);
    columns_ = own_columns_;
    capacity_ = capacity;
  }

 private:
  std::size_t offset(index_t c) const { return as_size(c, capacity_); }
};

namespace detail {

/// Takes back what a call counted before the policy refused it.
class undo {
 public:
  explicit undo(head_state& state)
      : state_(&state), length_(state.length()), observed_(state.observed()) {}
  undo(const undo&) = delete;
  undo& operator=(const undo&) = delete;
  ~undo() {
    if (state_ != nullptr) {
      state_->truncate(length_);
      state_->count_queries(observed_ - state_->observed());
    }
  }
  /// Nothing is to be taken back.
  void release() { state_ = nullptr; }

 private:
  head_state* state_;
  index_t length_;
  std::int64_t observed_;
};

}  // namespace detail

}  // namespace kvmeld::inline v0
