// SPDX-License-Identifier: MIT
/// What heads keep beside their rows, for which an engine has no place.
#pragma once

#include <vector>

#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// What heads keep beside their rows: log-mass, position, lengths.
class head_records {
 public:
  head_records(index_t heads, index_t capacity) : heads_(heads), capacity_(capacity) {
    const auto n = as_size(heads);
    const std::size_t slots = n * as_size(capacity);
    log_mass_.resize(slots), position_.resize(slots);
    length_.resize(n), next_position_.resize(n);
  }

  index_t heads() const { return heads_; }
  index_t capacity() const { return capacity_; }
  /// Slots in use of a head that is there.
  index_t length(index_t h) const { return length_[as_size(h)]; }
  /// Refused: a head that is not there.
  slot_metadata of(index_t h) {
    expects(h >= 0 && h < heads_, "head: expected 0 to ", heads_ - 1, ", got ", h);
    const auto i = as_size(h), first = i * as_size(capacity_);
    return {log_mass_.data() + first, position_.data() + first, &length_[i], &next_position_[i]};
  }

 private:
  index_t heads_, capacity_;
  std::vector<float> log_mass_;
  std::vector<index_t> position_, length_, next_position_;
};

}  // namespace kvmeld::inline v0
