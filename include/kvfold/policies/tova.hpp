#pragma once

#include <algorithm>  // std::copy
#include <array>
#include <string_view>

#include "kvfold/memory/head_state.hpp"
#include "kvfold/merge/evict.hpp"
#include "kvfold/merge/plan.hpp"
#include "kvfold/merge/slot_removal.hpp"
#include "kvfold/score/accumulated.hpp"
#include "kvfold/score/column_scores.hpp"
#include "kvfold/score/key_comparison.hpp"
#include "kvfold/score/observation.hpp"
#include "kvfold/score/queries.hpp"
#include "kvfold/search/select.hpp"
#include "kvfold/search/slot_scratch.hpp"

namespace kvfold {
inline namespace v0 {

/// TOVA, token omission via attention (arXiv 2401.06104).
///   score   s_j = Σ_g a_gj of the latest query alone (or the reference queries given)
///   select  sinks (the paper: 0), then the top of the rest by s
///   match   none: the others are evicted
struct tova {
  index_t sinks = 4;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "tova"; }
  static void parameters(auto& p, auto f) { f("sinks", p.sinks); }
  static constexpr std::array<column, 1> columns() { return {}; }
  index_t min_budget() const { return sinks + 1; }
  void validate() const { search::expect_count(name(), "sinks", sinks, 0); }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    std::copy(observed.attention.begin(), observed.attention.end(), state.column(0).begin());
  }
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    column_scores(head, queries.reference(1), {.combine = combine}, {.total = state.column(0)});
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    evict(head, target, protected_slots(head, sinks, 0), search::column_score(state.column(0)),
          work, out);
  }
  slot_removal choose_victim(const kv_head auto& head, const head_state& state, index_t,
                             const key_comparison&) const {
    return {.removed = search::lowest_scored(head.length(), protected_slots(head, sinks, 0),
                                             search::column_score(state.column(0)))};
  }
};

}  // namespace v0
}  // namespace kvfold
