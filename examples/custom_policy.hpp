// SPDX-License-Identifier: MIT
/// A policy of one's own: keep the keys of the lowest norm, which attention tends to favour
/// (Devoto et al. 2024, arXiv 2406.11430). The library is not touched.
#pragma once

#include "kvmeld/merge/evict.hpp"
#include "kvmeld/policies/policy.hpp"

namespace custom {

struct lowest_norm {
  kvmeld::index_t recent = 16;  ///< latest tokens that are never evicted

  static constexpr std::string_view name() { return "lowest_norm"; }
  static void parameters(auto& p, auto f) { f("recent", p.recent); }
  kvmeld::index_t min_budget() const { return recent + 1; }

  void plan(const kvmeld::kv_head auto& head, const kvmeld::head_state&, kvmeld::index_t target,
            kvmeld::slot_scratch& work, kvmeld::merge_plan& out) const {
    const auto norm = [&](kvmeld::index_t s) {
      float sum = 0;
      for (kvmeld::index_t i = 0; i < head.dim(); ++i) {
        sum += static_cast<float>(head.key(s)[i]) * static_cast<float>(head.key(s)[i]);
      }
      return sum;
    };
    kvmeld::evict(
        head, target, kvmeld::protected_slots(head, 0, recent),
        [&](auto s) { return kvmeld::rank(-norm(s)); }, work, out);
  }
};

}  // namespace custom
