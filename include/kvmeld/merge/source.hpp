// SPDX-License-Identifier: MIT
/// What rows of a plan are made of. For host and device.
#pragma once

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// One source of a row: `key_weight · k_source` goes into the row's key, `value_weight · v_source`
/// into its value.
struct merge_source {
  index_t source;          ///< the slot, before
  float key_weight = 1;    ///< of the slot's key
  float value_weight = 1;  ///< of the slot's value

  friend bool operator==(const merge_source&, const merge_source&) = default;
};

}  // namespace kvmeld::inline v0
