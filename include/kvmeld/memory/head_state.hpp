// SPDX-License-Identifier: MIT
/// What a policy remembers of each slot of a head, and how it merges. `slot_stat` is for the device
/// too.
#pragma once

#include <algorithm>  // std::copy_n
#include <span>
#include <string>
#include <string_view>
#include <utility>  // std::exchange, std::swap
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/memory/reserved.hpp"

namespace kvmeld::inline v0 {

/// What becomes of the slots' floats when slots are merged: `anchor`, the anchor's stays.
enum class slot_reduce { sum, max, anchor };

/// One float per slot: how it merges, and what a fresh slot has.
struct slot_stat {
  slot_reduce reduce = slot_reduce::sum;
  float initial = 0;

  bool operator==(const slot_stat&) const = default;
};

namespace detail {

/// `a` of the row's anchor and `b` of another source as one.
KVMELD_HD inline float reduced_stat(slot_reduce by, float a, float b) {
  return by == slot_reduce::sum ? a + b : by == slot_reduce::max ? (a < b ? b : a) : a;
}

}  // namespace detail

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
  reserved own_;              // the columns, then the memory; empty where they are the caller's
  std::span<float> columns_;  // [columns, capacity]
  std::span<float> memory_;   // aligned: sums over it do not depend on where it happens to lie
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
    const std::size_t columns = kinds.size() * as_size(capacity),
                      first = (columns + 15) / 16 * 16;  // of the memory, aligned to 64 bytes
    own_ = detail::reserved((first + memory) * sizeof(float));
    auto* const floats = reinterpret_cast<float*>(own_.data());
    columns_ = {floats, columns}, memory_ = {floats + first, memory};
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
  head_state(const head_state& from)
      : head_state(from.kinds_, from.memory_.size(), from.capacity_, from.policy_,
                   from.memory_follows_capacity_) {
    memory_capacity_ = from.memory_capacity_;
    copy_numbers(from);
  }
  /// What was moved from has no slots, no columns and no memory: its spans would write
  /// into the state that was moved to.
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
  /// Bytes that it holds: nothing where its numbers are the caller's.
  std::size_t reserved_bytes() const { return own_.held(); }
  /// Gives back what columns hold beyond `slots` slots, and those in use.
  void give_back(index_t slots = 0) {
    slots = std::min(capacity_, std::max(slots, length_));
    for (index_t c = 0; c < slot_stats() && own_.size() > 0; ++c) {
      own_.release((offset(c) + as_size(slots)) * sizeof(float),
                   (offset(c) + as_size(capacity_)) * sizeof(float));
    }
  }
  /// Slots that there are numbers for.
  index_t capacity() const { return capacity_; }
  /// The capacity that `memory` was laid out for, where its numbers are the caller's.
  index_t memory_capacity() const { return memory_capacity_; }

  /// As `make_head_state` makes it: no slots, no queries, all memory 0.
  void clear() {
    if (own_.size() > 0) {
      own_.clear(own_.size() - memory_.size_bytes(), own_.size());
    } else {
      std::ranges::fill(memory_, 0.0F);
    }
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
    copy_numbers(from);
  }

 private:
  std::size_t offset(index_t c) const { return as_size(c, capacity_); }
  void copy_numbers(const head_state& from) {
    for (index_t c = 0; c < slot_stats(); ++c) {
      std::copy_n(from.columns_.data() + from.offset(c), from.length_, columns_.data() + offset(c));
    }
    std::ranges::copy(from.memory_, memory_.begin());
    length_ = from.length_;
    observed_ = from.observed_;
  }
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
