// SPDX-License-Identifier: MIT
/// Memory that searches over a head's slots work in.
#pragma once

#include <cstddef>  // std::size_t
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/order.hpp"

namespace kvmeld {
inline namespace v0 {

/// Lists over the slots of one head, for selecting and matching. Each grows at first use; what they
/// hold between calls means nothing, but for what a search says that it writes there.
struct slot_scratch {
  std::vector<char> marks;                ///< [length] slot → kept?
  std::vector<index_t> order;             ///< slots, in some order
  std::vector<index_t> row_of;            ///< [length] slot → anchor of its row, or −1
  std::vector<float> numbers;             ///< whatever is computed
  std::vector<detail::keyed_slot> keyed;  ///< what is sorted

  /// Room for `capacity` slots, so that planning allocates nothing.
  void reserve(index_t capacity) {
    const auto n = static_cast<std::size_t>(capacity);
    marks.reserve(n), order.reserve(n), row_of.reserve(n), keyed.reserve(n);
  }
};

}  // namespace v0
}  // namespace kvmeld
