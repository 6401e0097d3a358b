#pragma once

#include <algorithm>  // std::clamp
#include <array>
#include <string_view>

#include "kvfold/each_query.hpp"
#include "kvfold/evict.hpp"
#include "kvfold/policy.hpp"

namespace kvfold {

/// RoCo (arXiv 2402.06262): robust cache omission.
///   score   mean of Σ_g a_gj over the queries that could see slot j, and its standard deviation
///   select  sinks, the last W, then `steady · B − W` by deviation (the authors' code counts the
///           window in), then the top of the rest by mean
///   match   nowhere: what leaves is gone
/// Mean and variance run along (Welford), so that they stay exact enough in float.
struct roco {
  index_t sinks = 4;
  index_t window = 10;
  float steady = 0.3F;  ///< share of the budget, the window included

  static constexpr std::string_view name() { return "roco"; }
  enum column_name : index_t { mean, squares, queries_seen };  // `squares`: Σ (a − mean)²
  static constexpr std::array<column, 3> columns() { return {}; }
  index_t least() const { return sinks + window + 1; }
  void validate() const {
    expect_count(name(), "sinks", sinks, 0);
    expect_count(name(), "tokens in the window", window, 0);
    expects(steady >= 0 && steady <= 1, "roco: steady as a share in [0, 1] expected, ", steady,
            " came");
  }

  void observe(const kv_head auto& head, head_state& state, const observation& seen) const {
    count(head, state, seen.attention, head.seen());
  }
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    for_each_query(head, queries, group_combine::sum,
                   [&](auto attention, index_t at, index_t) { count(head, state, attention, at); });
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target,
            merge_plan& out) const {
    const auto stays = protected_slots(head, sinks, window);
    index_t alone = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      alone += stays(s) ? 1 : 0;
    }
    const index_t room = std::max(target - alone, index_t{0});
    const index_t varied = std::clamp(share_of(steady, target) - window, index_t{0}, room);
    const auto variance = [&](index_t s) {  // ranks as its root does
      const auto i = static_cast<std::size_t>(s);
      const float n = state.column(queries_seen)[i];
      return n > 0 ? rank(state.column(squares)[i] / n) : 0.0F;
    };
    select(head.length(), alone + varied, stays, variance, out);
    out.row_of().assign(out.marks().begin(), out.marks().end());
    const auto chosen = [&](index_t s) { return out.row_of()[static_cast<std::size_t>(s)] != 0; };
    evict(head, target, chosen, by(state.column(mean)), out);
  }

 private:
  static void count(const kv_head auto& head, head_state& state, std::span<const float> attention,
                    index_t at) {
    const auto m = state.column(mean), m2 = state.column(squares), n = state.column(queries_seen);
    for (std::size_t s = 0; s < attention.size(); ++s) {
      if (head.position(static_cast<index_t>(s)) <= at) {
        const float off = attention[s] - m[s];
        m[s] += off / ++n[s];
        m2[s] += off * (attention[s] - m[s]);
      }
    }
  }
};

}  // namespace kvfold
