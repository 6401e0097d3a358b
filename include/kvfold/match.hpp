/// Where the leaving go: the nearest of those that stay.
#pragma once

#include "kvfold/view.hpp"

namespace kvfold {

/// `argmax_r k_r·k_c` over the slots for which `candidate(r)`; ties to the lower slot; -1: none.
template <class Candidate>
index_t nearest_by_dot(const kv_head auto& head, index_t c, Candidate candidate) {
  index_t best = -1;
  float most = 0;
  for (index_t r = 0; r < head.length(); ++r) {
    if (r == c || !candidate(r)) {
      continue;
    }
    float dot = 0;
    for (index_t i = 0; i < head.dim(); ++i) {
      dot += static_cast<float>(head.key(r)[i]) * static_cast<float>(head.key(c)[i]);
    }
    if (best < 0 || dot > most) {
      best = r, most = dot;
    }
  }
  return best;
}

}  // namespace kvfold
