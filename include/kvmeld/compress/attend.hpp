// SPDX-License-Identifier: MIT
/// Decode attention over a compressed cache: softmax with log-mass.
#pragma once

#include <span>

#include "kvmeld/score/attention.hpp"

namespace kvmeld::inline v0 {

/// Attention with log-mass.
inline void attend(const head_ref& head, const float* q, float* out,
                   std::span<float> probabilities = {}, std::span<float> log_sum_exp = {},
                   fused_similarity* comparison = nullptr) {
  attend(head, log_mass_of<head_ref>{head}, q, out, probabilities, log_sum_exp, comparison);
}

}  // namespace kvmeld::inline v0
