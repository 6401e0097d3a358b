/// Decode attention over a compressed cache: softmax with log-mass.
#pragma once

#include <span>

#include "kvmeld/score/attention.hpp"

namespace kvmeld {
inline namespace v0 {

/// Attention with log-mass.
template <kv_head Head>
void attend(const Head& head, const float* q, float* out, std::span<float> probabilities = {},
            std::span<float> log_sum_exp = {}, key_comparison* comparison = nullptr) {
  using erased = detail::erased_head<Head>;
  const erased& one = detail::erased(head);
  attend(one, log_mass_of<erased>{one}, q, out, probabilities, log_sum_exp, comparison);
}

}  // namespace v0
}  // namespace kvmeld
