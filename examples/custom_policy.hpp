/// A policy of one's own: keep the keys of the lowest norm, which attention tends to favour
/// (Devoto et al. 2024, arXiv 2406.11430). The library is not touched.
#pragma once

#include "kvfold/merge/evict.hpp"
#include "kvfold/policy.hpp"

namespace custom {

struct lowest_norm {
  kvfold::index_t recent = 16;  ///< latest tokens that are never evicted

  static constexpr std::string_view name() { return "lowest_norm"; }
  static void parameters(auto& p, auto f) { f("recent", p.recent); }
  kvfold::index_t min_budget() const { return recent + 1; }

  void plan(const kvfold::kv_head auto& head, const kvfold::head_state&, kvfold::index_t target,
            kvfold::slot_scratch& work, kvfold::merge_plan& out) const {
    const auto norm = [&](kvfold::index_t s) {
      float sum = 0;
      for (kvfold::index_t i = 0; i < head.dim(); ++i) {
        sum += static_cast<float>(head.key(s)[i]) * static_cast<float>(head.key(s)[i]);
      }
      return sum;
    };
    kvfold::evict(
        head, target, kvfold::protected_slots(head, 0, recent),
        [&](auto s) { return kvfold::rank(-norm(s)); }, work, out);
  }
};

}  // namespace custom
