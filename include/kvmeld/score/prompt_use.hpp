// SPDX-License-Identifier: MIT
/// What a policy takes of a prompt's queries, and what it needs of a decode step's attention.
#pragma once

#include "kvmeld/score/future_positions.hpp"

namespace kvmeld {
inline namespace v0 {

/// What a policy takes of a prompt's queries: a `compressor` gives it just that, and keeps no more.
struct prompt_use {
  /// What `plan` is given: nothing, the latest queries as they are, some that are spread over the
  /// prompt, or these shifted to the positions to come (lookahead). The last two are observed too.
  enum class planned { none, latest, spread, lookahead };

  bool observes = false;  ///< every chunk's own queries are observed
  index_t reach = 0;      ///< ... together with so many that came before the chunk
  planned plans = planned::none;
  index_t count = 256;              ///< of what it plans on: queries
  future_positions positions = {};  ///< of lookahead

  bool needs_queries() const { return observes || plans != planned::none; }
};

/// What a policy needs of a decode step's attention. An engine says what it gives when it makes a
/// `compressor`.
struct observation_needs {
  bool probabilities = false;  ///< [group, length]
  bool log_sum_exp = false;    ///< [group]
  bool query = false;          ///< [group, dim]
};

}  // namespace v0
}  // namespace kvmeld
