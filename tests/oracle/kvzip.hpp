// SPDX-License-Identifier: MIT
// KVzip (arXiv 2505.23416, section 3.2 and algorithm 1): the largest attention that a second
// reading gives each slot of a prompt.
//
// Readings that the library follows:
//  - The maximum is over the queries of all that is read again, the words before the prompt's
//    tokens too, and over the query heads of a group (the authors' code: amax over both).
//  - The softmax is over the prompt and over what was read again so far. The authors cut a prompt
//    of more than 2048 tokens in chunks, and normalise each over itself; the library does not.
//  - Sinks and the latest are kept first (the authors: the system prompt), then the rest by score.
//
// kvzip+ (kvpress): attention times |W_O v_j| / |h_i|, W_O of the query's head and h_i what the
// attention of its layer was given for its token.
#pragma once

#include "oracle/linear.hpp"
#include "oracle/policies.hpp"

namespace oracle {

struct kvzip {
  int sinks = 4;
  int recent = 0;

  /// s [prompt]: `again` are the keys [n][dim] of what is read behind it, `queries`
  /// [n][group][dim]. Of kvzip+: `projection` [group][hidden][value_dim], `norms` [n].
  static vec scores(const head& prompt, const mat& again, const tensor& queries,
                    const tensor& projection = {}, const vec& norms = {}) {
    head all = prompt;
    vec s(prompt.slots.size(), 0.0);
    for (std::size_t i = 0; i < queries.size(); ++i) {
      append(all, again[i], vec(again[i].size(), 0.0));
      const mat p = attend(all, queries[i]).probabilities;
      for (std::size_t g = 0; g < p.size(); ++g)
        for (std::size_t j = 0; j < s.size(); ++j) {
          double factor = 1;
          if (!projection.empty()) {
            const vec out = times(projection[g], prompt.slots[j].value);
            factor = std::sqrt(dot(out, out)) / norms[i];
          }
          s[j] = std::max(s[j], p[g][j] * factor);
        }
    }
    return s;
  }

  void evict_to(head& h, const vec& score, int target) const {
    evict(h, protected_slots(h, sinks, recent), score, target);
  }

  /// Without a second reading: what the prompt's own queries see, each of the slots before it.
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    evict_to(h, column_scores(h, queries, positions, {}).largest, target);
  }
  mat step(head&, const mat&, const vec&, const vec&, int, int) const {
    throw std::logic_error("oracle: kvzip: expected a prompt, got a step");
  }
};

}  // namespace oracle
