// SPDX-License-Identifier: MIT
/// What policies observe, and what they need of it: one decode step's attention, which enters a
/// score, and a prompt's queries. For host and device.
#pragma once

#include <algorithm>  // std::copy_n
#include <cmath>      // std::pow
#include <cstdint>    // std::int64_t
#include <span>
#include <string_view>

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// How the attention of a group's query heads becomes one number per slot.
enum class group_combine { sum, mean, max };

struct slot_scratch;

/// What is known of a step after the newest token was appended and attended. An engine with its own
/// attention fills in what it has; a policy that needs more refuses.
struct observation {
  std::span<const float> probabilities;     ///< [group, length]
  std::span<const float> log_sum_exp = {};  ///< [group] of the logits; empty: not known
  const float* query = nullptr;             ///< [group, dim] rotated, the newest's; null: not known
  std::span<const float> attention = {};    ///< [length] the group combined; `observe` fills it in
  slot_scratch* scratch = nullptr;          ///< memory to work in; `observe` fills it in
};

/// What a policy needs of a decode step's attention. An engine says what it gives when it makes a
/// `compressor`.
struct observation_needs {
  bool probabilities = false;  ///< [group, length]
  bool log_sum_exp = false;    ///< [group]
  bool query = false;          ///< [group, dim]
};

namespace score {

/// The group's number `a` of the query heads so far, with that of one more.
KVMELD_HD inline float with_query_head(group_combine how, float a, float p) {
  return how == group_combine::max ? (a < p ? p : a) : a + p;
}
/// ... of all `group`.
KVMELD_HD inline float of_group(group_combine how, float a, index_t group) {
  return how == group_combine::mean ? a / static_cast<float>(group) : a;
}

/// `s_j ← λ s_j + a_j`; λ = 1: cumulative attention.
KVMELD_HD inline float accumulated(float score, float attention, float decay) {
  return decay * score + attention;
}

/// The group's probabilities as one number per slot, into `combined [length]`.
inline std::span<const float> combine_group(std::span<const float> probabilities, index_t group,
                                            group_combine how, std::span<float> combined) {
  const std::size_t n = combined.size();
  std::copy_n(probabilities.begin(), n, combined.begin());
  for (std::size_t g = 1; g < as_size(group); ++g) {
    for (std::size_t s = 0; s < n; ++s) {
      const float a = probabilities[g * n + s];
      combined[s] = with_query_head(how, combined[s], a);
    }
  }
  if (how == group_combine::mean) {
    for (float& a : combined) {
      a /= static_cast<float>(group);
    }
  }
  return combined;
}

/// Queries at the beginning of a prompt see next to nothing: a spread leaves them out.
inline constexpr index_t blind_queries = 4;

/// Which of `queries` queries is the `i`-th of `n` that are spread evenly over them from `first`
/// on.
KVMELD_HD inline index_t spread_query(index_t i, index_t n, index_t queries, index_t first) {
  const std::int64_t span = std::int64_t{queries} - 1 - first;
  return n == 1 ? queries - 1 : first + static_cast<index_t>(span * i / (std::int64_t{n} - 1));
}

/// `future_positions`: query `i` of `n` goes so many positions beyond the next one.
KVMELD_HD inline index_t future_position(index_t i, index_t n, index_t horizon, double fade) {
  if (fade - fade != 0) {  // infinite
    return static_cast<index_t>(std::int64_t{i} * horizon / n);
  }
  const double share = static_cast<double>(i) / n;
  return static_cast<index_t>(fade * (std::pow(horizon / fade + 1, share) - 1));
}

}  // namespace score

/// How queries are spread over future positions. How many there will be is unknown, and the next
/// ones are certain: the density of queries `t` positions ahead is proportional to
/// `1 / (t + fade)` up to the horizon.
struct future_positions {
  index_t horizon = 256;  ///< future positions
  float fade = 16;        ///< positions ahead where the density is half; infinity: even throughout

  /// Query `i` of `n` goes so many positions beyond the next one, `0 … horizon − 1`.
  index_t operator()(index_t i, index_t n) const {
    return score::future_position(i, n, horizon, double{fade});
  }

  /// Throws on a horizon or fade that is not above 0; `caller` begins the message.
  void validate(std::string_view caller) const {
    expects(horizon > 0, caller, ": expected a horizon of at least 1 position, got ", horizon);
    expects(fade > 0, caller, ": expected a fade above 0 positions, got ", fade);
  }
};

/// How many queries lookahead takes, and where they go.
struct lookahead_options {
  index_t count = 256;          ///< queries
  future_positions ahead = {};  ///< where they go
};

/// What a policy takes of a prompt's queries: a `compressor` gives it just that, and keeps no more.
struct prompt_use {
  /// What `plan` is given: nothing, the latest queries as they are, some that are spread over the
  /// prompt, or these shifted to future positions (lookahead). The last two are observed too.
  enum class planned { none, latest, spread, lookahead };

  bool observes = false;            ///< every chunk's own queries are observed
  index_t reach = 0;                ///< ... together with so many before the chunk
  index_t latest = 0;               ///< ... only the last so many of both; 0: all
  planned plans = planned::none;    ///< what `plan` is given
  index_t count = 256;              ///< of what it plans on: queries
  future_positions positions = {};  ///< of lookahead

  bool needs_queries() const { return observes || plans != planned::none; }  ///< does it take any?
};

/// What a plan of decode needs of earlier steps, each of one token: until it is near a `compressor`
/// holds no more. Not for policies whose attention or `after_compress` reads the state.
struct decode_use {
  /// Observed right before it; those before them change nothing, but for what is kept.
  index_t steps = std::numeric_limits<index_t>::max();
  bool columns = false;    ///< kept: the columns, each float's upper 16 bits, as a prompt's scores
  std::size_t memory = 0;  ///< ... and the first so many floats of the memory
};

}  // namespace kvmeld::inline v0
