// SPDX-License-Identifier: MIT
/// A float per slot that a policy keeps, and how it merges with its slot. For host and device.
#pragma once

#include "kvmeld/config.hpp"

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

}  // namespace kvmeld::inline v0
