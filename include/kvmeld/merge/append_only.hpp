// SPDX-License-Identifier: MIT
/// Admission: plans that never touch slots that are sealed, for pages that are only appended to.
#pragma once

#include <algorithm>  // std::ranges::any_of
#include <vector>

#include "kvmeld/merge/plan.hpp"

namespace kvmeld {
inline namespace v0 {

/// The part of `plan` that is about the new slots, those from `sealed` on. The first `sealed` slots
/// are kept, byte for byte. New slots that `plan` keeps are kept; those that it evicts or merges
/// into a sealed slot are evicted; those that it merges with one another are merged. A new slot
/// that `plan` merges sealed slots into is kept as it is, alone; others merged into it are evicted.
/// The head is longer than `plan` has rows by the sealed slots that `plan` would have removed.
///
/// `sealed = length − 1` decides whether one new token gets a slot; a chunk, or a window of recent
/// slots that the engine still has open, may be decided at once.
void append_only(const merge_plan& plan, const kv_head auto& head, index_t sealed,
                 merge_plan& out) {
  expects(&plan != &out, "append_only: expected two plans, got the same one twice");
  expects(sealed >= 0 && sealed <= plan.length(), "append_only: expected 0 to ", plan.length(),
          " sealed slots, got ", sealed);
  expects(plan.length() == head.length(), "append_only: expected a plan of ", head.length(),
          " slots, got ", plan.length());
  check(plan);
  out.reset(plan.length());
  for (index_t s = 0; s < sealed; ++s) {
    out.keep(s, head.log_mass(s));
  }
  const auto dim = static_cast<std::size_t>(plan.dim());
  std::vector<float> keys(static_cast<std::size_t>(sealed) * dim), values = keys;
  const auto correct = [&](std::vector<float>& to, std::span<const float> delta) {
    to.insert(to.end(), delta.begin(), delta.end());
    to.resize(static_cast<std::size_t>(out.rows()) * dim);  // no correction: zeros
  };
  for (index_t r = 0; r < plan.rows(); ++r) {
    const index_t anchor = plan.anchor(r);
    if (anchor < sealed) {
      continue;
    }
    const auto sources = plan.row(r);
    if (std::ranges::any_of(sources, [&](const merge_source& e) { return e.source < sealed; })) {
      out.keep(anchor, head.log_mass(anchor));
      correct(keys, {}), correct(values, {});
    } else {
      std::ranges::for_each(sources, [&](const merge_source& e) { out.add(e); });
      out.end_row(plan.log_mass(r));
      correct(keys, plan.key_correction(r)), correct(values, plan.value_correction(r));
    }
  }
  if (!plan.key_corrections().empty()) {
    out.correct_keys(keys, plan.dim());
  }
  if (!plan.value_corrections().empty()) {
    out.correct_values(values, plan.dim());
  }
  out.set_measured(plan.measured());
}

}  // namespace v0
}  // namespace kvmeld
