// SPDX-License-Identifier: MIT
// Where the rows of a plan lie once it is carried out.
#pragma once

#include <vector>

#include "kvmeld/merge/plan.hpp"

namespace fixtures {

/// Row ↦ slot: its anchor's own, where that is one of the slots that are left; the others fill what
/// is free, both ascending.
inline std::vector<kvmeld::index_t> placed(const kvmeld::merge_plan& plan) {
  std::vector<kvmeld::index_t> slot, free;
  std::vector<bool> taken(static_cast<std::size_t>(plan.rows()));
  for (kvmeld::index_t r = 0; r < plan.rows(); ++r) {
    if (plan.anchor(r) < plan.rows()) {
      taken[static_cast<std::size_t>(plan.anchor(r))] = true;
    }
  }
  for (kvmeld::index_t s = 0; s < plan.rows(); ++s) {
    if (!taken[static_cast<std::size_t>(s)]) {
      free.push_back(s);
    }
  }
  std::size_t next = 0;
  for (kvmeld::index_t r = 0; r < plan.rows(); ++r) {
    slot.push_back(plan.anchor(r) < plan.rows() ? plan.anchor(r) : free.at(next++));
  }
  return slot;
}

}  // namespace fixtures
