// SPDX-License-Identifier: MIT
/// What a policy remembers of each slot of a head, and how it merges. `slot_stat` is for the device
/// too.
#pragma once

#include <algorithm>  // std::min, std::copy_n
#include <bit>        // std::bit_cast
#include <cstdint>
#include <cstring>  // std::memcpy
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
  slot_reduce reduce = slot_reduce::sum;  ///< how it merges
  float initial = 0;                      ///< what a fresh slot has

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
  reserved own_;  // the memory, then the columns; at rest packed; empty where the caller has both
  std::span<float> columns_;  // [columns, capacity]
  std::span<float> memory_;   // aligned: sums over it do not depend on where it happens to lie
  index_t capacity_ = 0, memory_capacity_ = 0;
  bool memory_follows_capacity_ = true;
  index_t length_ = 0;
  std::int64_t observed_ = 0;
  bool rests_ = false;
  std::size_t kept_ = 0;  // floats of the memory, at rest
};

}  // namespace detail

/// Per-head state of a policy: columns of one float per slot, which move with the slots, and a flat
/// block of floats that does not. Being plain numbers it can be saved and restored. At rest it has
/// what little a plan to come needs of earlier steps, and no numbers to read.
class head_state : private detail::state_fields {
 public:
  /// `policy`: the name of the one that it is for; a state for none only follows plans.
  /// `memory_follows_capacity`: does the layout of the memory depend on the capacity?
  head_state(std::span<const slot_stat> kinds, std::size_t memory, index_t capacity,
             std::string_view policy = {}, bool memory_follows_capacity = true) {
    policy_ = policy, kinds_.assign(kinds.begin(), kinds.end());
    const std::size_t columns = kinds.size() * as_size(capacity);
    own_ = detail::reserved((padded(memory) + columns) * sizeof(float));
    auto* const floats = reinterpret_cast<float*>(own_.data());
    memory_ = {floats, memory}, columns_ = {floats + padded(memory), columns};
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
  /// A copy, or what was moved.
  head_state& operator=(head_state from) noexcept {
    std::swap(static_cast<state_fields&>(*this), static_cast<state_fields&>(from));
    return *this;
  }
  ~head_state() = default;

  /// The name of the policy that it was made for.
  std::string_view policy() const { return policy_; }

  /// Slots that have numbers; those appended since get theirs from `extend`.
  index_t length() const { return length_; }
  index_t slot_stats() const { return static_cast<index_t>(kinds_.size()); }  ///< columns
  /// What each of them is.
  std::span<const slot_stat> kinds() const { return kinds_; }
  slot_reduce reduce(index_t c) const { return kinds_[as_size(c)].reduce; }  ///< how `c` merges

  /// Column `c` `[length]`; at rest none.
  std::span<float> column(index_t c) { return columns_.subspan(offset(c), awake(length_)); }
  /// ... read only.
  std::span<const float> column(index_t c) const {
    return columns_.subspan(offset(c), awake(length_));
  }
  /// The policy's floats; at rest none.
  std::span<float> memory() { return memory_.first(rests_ ? 0 : memory_.size()); }
  /// ... read only.
  std::span<const float> memory() const { return memory_.first(rests_ ? 0 : memory_.size()); }
  /// How many these are, at rest too.
  std::size_t memory_size() const { return memory_.size(); }

  /// Throws unless there are numbers for `length` slots.
  void expect_capacity(index_t length) const {
    expects(length <= capacity_, "state: expected at most ", capacity_, " slots, got ", length);
  }
  /// Initial numbers for the slots appended since the last call. A state at rest has numbers again:
  /// of what it kept, else the initial ones.
  void extend(index_t length) {
    expect_capacity(length);
    wake();
    for (index_t c = 0; c < slot_stats(); ++c) {
      for (index_t s = length_; s < length; ++s) {
        columns_[offset(c) + as_size(s)] = kinds_[as_size(c)].initial;
      }
    }
    length_ = length;
  }
  /// Forgets the slots from `length` on.
  void truncate(index_t length) {
    if (length < length_) {
      wake();
    }
    length_ = length;
  }

  /// Keeps of its numbers the first `floats` of the memory, once it has observed, and the columns,
  /// each float cut to its upper 16 bits, or none of them. All else is as at first, and takes no
  /// memory until `extend`. Numbers of the caller's stay.
  void rest(bool columns, std::size_t floats) {
    if (rests_ || own_.size() == 0) {
      return;
    }
    kept_ = observed_ > 0 ? std::min(floats, memory_.size()) : 0;
    length_ = columns ? length_ : 0;
    for (index_t c = 0; c < slot_stats(); ++c) {
      for (index_t s = 0; s < length_; ++s) {
        const auto bits = std::bit_cast<std::uint32_t>(column(c)[as_size(s)]);
        const auto upper = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(packed(c, s), &upper, sizeof upper);
      }
    }
    rests_ = true;
    own_.release(bytes(), own_.size());  // a state that wakes sets what it has not kept
  }
  bool rests() const { return rests_; }  ///< is it at rest?

  /// Queries observed so far.
  std::int64_t observed() const { return observed_; }
  void count_queries(std::int64_t n) { observed_ += n; }  ///< `n` more were observed

  /// Bytes for the slots in use.
  std::size_t bytes() const {
    return rests_ ? bytes_at_rest(kinds_.size(), length_, kept_)
                  : sizeof(float) * (kinds_.size() * as_size(length_) + memory_.size());
  }
  /// The same of a state at rest that keeps so many columns and floats.
  static std::size_t bytes_at_rest(std::size_t columns, index_t slots, std::size_t floats) {
    return sizeof(float) * floats + sizeof(std::uint16_t) * columns * as_size(slots);
  }
  /// Bytes that it holds: nothing where its numbers are the caller's.
  std::size_t reserved_bytes() const { return own_.held(); }
  /// Gives back what columns hold beyond `slots` slots, and those in use.
  void give_back(index_t slots = 0) {
    slots = std::min(capacity_, std::max(slots, length_));
    const std::size_t first = padded(memory_.size());
    for (index_t c = 0; c < slot_stats() && own_.size() > 0 && !rests_; ++c) {
      own_.release((first + offset(c) + as_size(slots)) * sizeof(float),
                   (first + offset(c) + as_size(capacity_)) * sizeof(float));
    }
  }
  /// Slots that there are numbers for.
  index_t capacity() const { return capacity_; }
  /// The capacity that `memory` was laid out for, where its numbers are the caller's.
  index_t memory_capacity() const { return memory_capacity_; }

  /// As `make_head_state` makes it: no slots, no queries, all memory 0.
  void clear() {
    if (own_.size() > 0) {
      own_.clear(0, memory_.size_bytes());
    } else {
      std::ranges::fill(memory_, 0.0F);
    }
    length_ = 0;
    observed_ = 0;
    rests_ = false;
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
  std::size_t awake(index_t n) const { return rests_ ? 0 : as_size(n); }
  static std::size_t padded(std::size_t memory) { return (memory + 15) / 16 * 16; }  // 64 bytes
  /// Where a column's number lies at rest: after those of the memory.
  std::byte* packed(index_t c, index_t s) const {
    return own_.data() + bytes_at_rest(as_size(c), length_, kept_) +
           as_size(s) * sizeof(std::uint16_t);
  }
  /// Columns as they were packed in `from`, which may be this. From the end: over what was read.
  void unpack(const head_state& from) {
    for (index_t c = slot_stats(); c-- > 0;) {
      for (index_t s = from.length_; s-- > 0;) {
        std::uint16_t upper = 0;
        std::memcpy(&upper, from.packed(c, s), sizeof upper);
        const std::uint32_t bits = std::uint32_t{upper} << 16;
        std::memcpy(&columns_[offset(c) + as_size(s)], &bits, sizeof bits);
      }
    }
    std::ranges::fill(memory_.subspan(from.kept_), 0.0F);
  }
  void wake() {
    if (std::exchange(rests_, false)) {
      unpack(*this);
    }
  }
  void copy_numbers(const head_state& from) {
    const std::size_t floats = from.rests_ ? from.kept_ : memory_.size();
    rests_ = false;
    std::copy_n(from.memory_.begin(), floats, memory_.begin());
    for (index_t c = 0; c < slot_stats() && !from.rests_; ++c) {
      std::copy_n(from.columns_.data() + from.offset(c), from.length_, columns_.data() + offset(c));
    }
    length_ = from.length_;
    observed_ = from.observed_;
    if (from.rests_) {
      unpack(from);
      rest(true, floats);
    }
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
