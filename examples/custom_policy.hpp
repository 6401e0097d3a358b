// SPDX-License-Identifier: MIT
/// A policy of one's own: keep the keys of the lowest norm, which attention tends to favour
/// (Devoto et al. 2024, arXiv 2406.11430). The library is not touched.
#pragma once

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace custom {

struct lowest_norm {
  kvmeld::index_t recent = 16;  ///< latest tokens that are never evicted

  static constexpr std::string_view name() { return "lowest_norm"; }
  static void parameters(auto& p, auto f) { f("recent", p.recent); }

  kvmeld::protection protects(const kvmeld::head_ref&, kvmeld::index_t) const {
    return {.recent = recent};
  }
  float score(const kvmeld::head_ref& head, const kvmeld::head_state&, kvmeld::index_t slot) const {
    return -kvmeld::norm(head.key(slot), head.dim());
  }
};  // the plan, the victim of a decode step and the least budget follow

}  // namespace custom
