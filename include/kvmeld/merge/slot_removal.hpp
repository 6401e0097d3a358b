// SPDX-License-Identifier: MIT
/// What rows of a plan are made of, and a plan of one slot less: what a decode step does to a head
/// at its budget.
#pragma once

#include <array>
#include <optional>

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// One source of a row: `key_weight · k_source` goes into the row's key, `value_weight · v_source`
/// into its value.
struct merge_source {
  index_t source;
  float key_weight = 1;
  float value_weight = 1;

  friend bool operator==(const merge_source&, const merge_source&) = default;
};

/// A plan that removes one slot, for decode: the key and value of `removed` are weighted into
/// `into` (`nowhere`: evicted), and the newest slot moves to its place. Its value may also be
/// shared by the `share_count` slots that follow it, up to position `share_until_position`: each
/// takes 1/`share_count` of it. No other row is touched.
struct slot_removal {
  static constexpr index_t nowhere = -1;

  index_t removed = nowhere;                     ///< `nowhere`: all are kept
  index_t into = nowhere;                        ///< `nowhere`: the slot is evicted
  float kept_weight = 1;                         ///< of `into`'s own value, and key
  float removed_weight = 0;                      ///< of `removed`'s value, and key
  float log_mass = 0;                            ///< of `into` afterwards
  std::optional<float> kept_key_weight = {};     ///< none: as the values'
  std::optional<float> removed_key_weight = {};  ///< none: as the values'
  std::optional<float> measured = {};            ///< for the policy's own `update_memory`
  index_t share_count = 0;                       ///< slots that share the removed value
  index_t share_until_position = nowhere;        ///< the position of the last

  /// What `into` becomes, where there is one.
  std::array<merge_source, 2> sources() const {
    return {{{into, kept_key_weight.value_or(kept_weight), kept_weight},
             {removed, removed_key_weight.value_or(removed_weight), removed_weight}}};
  }
};

}  // namespace kvmeld::inline v0
