// SPDX-License-Identifier: MIT
/// How a number per slot merges with its slot. For host and device.
#pragma once

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {

/// What becomes of a column's numbers when slots are merged.
enum class column_merge { sum, max, anchor };

namespace detail {

/// `a` of the row's anchor and `b` of another source as one.
KVMELD_HD inline float merged_column(column_merge fold, float a, float b) {
  return fold == column_merge::sum ? a + b : fold == column_merge::max ? (a < b ? b : a) : a;
}

}  // namespace detail

}  // namespace v0
}  // namespace kvmeld
