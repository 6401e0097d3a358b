// SPDX-License-Identifier: MIT
/// A policy of one's own: keep the keys of the lowest norm, which attention tends to favour
/// (Devoto et al. 2024, arXiv 2406.11430). The library is not touched.
#pragma once

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace custom {

struct lowest_norm {
  kvmeld::index_t recent = 16;

  static constexpr std::string_view name() { return "lowest_norm"; }
  static constexpr std::tuple options{kvmeld::option(
      "recent", &lowest_norm::recent, 0, kvmeld::any_count, "latest tokens, never evicted")};

  kvmeld::protection protects(const kvmeld::head_ref&, kvmeld::index_t) const {
    return {.recent = recent};
  }
  float score(const kvmeld::head_ref& head, const kvmeld::head_state&, kvmeld::index_t slot) const {
    return -kvmeld::norm(head.key(slot), head.dim());
  }
};  // the plan and the least budget follow, and text, checks and equality of the options

}  // namespace custom
