#pragma once

#include <string_view>

#include "kvfold/arena.hpp"
#include "kvfold/evict.hpp"
#include "kvfold/match.hpp"
#include "kvfold/policy.hpp"

namespace kvfold {

/// KeyDiff (arXiv 2504.15364): the keys least like all others. Needs no attention.
///   score   s_j = −cos(k_j, mean_i k_i/‖k_i‖) over all slots held, keys as stored
///   select  sinks and the last W tokens (the paper: 0 and 0), then the top of the rest by s
///   match   nowhere: what leaves is gone
/// A zero key adds nothing to the mean and has cosine 0.
struct key_diff {
  index_t sinks = 4;
  index_t window = 0;

  static constexpr std::string_view name() { return "key_diff"; }
  index_t least() const { return sinks + window + 1; }
  void validate() const {
    expect_count(name(), "sinks", sinks, 0);
    expect_count(name(), "tokens in the window", window, 0);
  }

  void plan(const kv_head auto& head, const head_state&, index_t target, merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim();
    arena scratch(out.numbers(), static_cast<std::size_t>(n) + 2 * static_cast<std::size_t>(dim));
    auto score = scratch.column(n), mean = scratch.column(dim), key = scratch.column(dim);
    mean.setZero();
    for (index_t s = 0; s < n; ++s) {
      to_floats(head.key(s), dim, key.data());
      score[s] = std::sqrt(dot(row<float>{key.data()}, row<float>{key.data()}, dim));
      if (score[s] > 0) {
        mean += key / score[s];
      }
    }
    const float length = mean.norm();  // the mean's own scale changes no cosine
    for (index_t s = 0; s < n; ++s) {
      const float norms = score[s] * length;
      score[s] = norms > 0 ? -dot(head.key(s), row<float>{mean.data()}, dim) / norms : 0.0F;
    }
    evict(head, target, protected_slots(head, sinks, window),
          by({score.data(), static_cast<std::size_t>(n)}), out);
  }
};

}  // namespace kvfold
