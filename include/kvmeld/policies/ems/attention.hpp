// SPDX-License-Identifier: MIT
/// Attention over EMS's entries: what their tokens would have done each on its own, from one dot
/// product an entry; and the Global-Local score of them.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::exp, std::log
#include <limits>     // std::numeric_limits
#include <optional>
#include <vector>

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/policies/ems/table.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// The logits of an entry's tokens for one query. Token `t` has ℓ_t = cap(scale · ‖k_t‖ · q·k̂), k̂
/// the direction of the entry's key; where it `rotates`, of the key rotated to the token's place,
/// one dot product for each. Not for several threads.
template <kv_head Head, class State>
class ems_logits {
 public:
  ems_logits(const Head& head, const ems_table<State>& table, bool rotates)
      : head_(head), table_(table), terms_(head) {
    if (rotates) {
      turn_.emplace(head.spec().rope, head.dim());
    }
  }

  const ems_table<State>& table() const { return table_; }
  const score::logit_terms& terms() const { return terms_; }
  /// scale · q·k̂ of shared entry `s` from `dot` = q·k.
  float slope(index_t s, float dot) const {
    const float norm = table_.at(ems_table<State>::norm, s);
    return norm > 0 ? head_.scale() * dot / norm : 0.0F;
  }
  /// ℓ_t; `of_entry`: the slope of its entry `s`.
  float operator()(index_t s, index_t token, const float* q, float of_entry) const {
    const float norm = table_.at(ems_table<State>::norm, token);
    return terms_.cap(norm * (turn_ && token != s ? turned_slope(s, token, q) : of_entry));
  }
  /// ln Σ_t exp(ℓ_t)
  float log_sum(index_t s, const float* q, float of_entry) const {
    score::softmax<> all;
    if (turn_) {
      table_.each(s, [&](index_t token) { all.add((*this)(s, token, q, of_entry)); });
    } else {  // the same, asked once
      table_.each(s, [&](index_t token) {
        all.add(terms_.cap(of_entry * table_.at(ems_table<State>::norm, token)));
      });
    }
    return all.log_sum_exp();
  }

 private:
  KVMELD_NOINLINE float turned_slope(index_t s, index_t token, const float* q) const {
    expects(errc::unsupported, q != nullptr, "ems: expected the query with merge_unrotated=1");
    float key[row_floats];
    to_floats(head_.key(s), head_.dim(), key);
    turn_->by(table_.position(head_, token) - head_.position(s));
    (*turn_)(key);
    return slope(s, score::dot(row<const float>{q}, row<const float>{key}, head_.dim()));
  }

  Head head_;
  ems_table<State> table_;
  score::logit_terms terms_;
  mutable std::optional<rotation> turn_;
};

/// The mass function: (slot, q·k, q) ↦ logit of an entry, from which `attend` makes the sum of its
/// tokens' probabilities. Without a query: refused where entries are merged un-rotated.
template <kv_head Head>
struct ems_mass {
  static constexpr bool caps = true;  // each token's own logit
  Head head;
  ems_logits<Head, const head_state> logits;

  float operator()(index_t s, float dot, const float* q = nullptr) const {
    return logits.table().shared(s) ? logits.log_sum(s, q, logits.slope(s, dot))
                                    : logits.terms().cap(head.scale() * dot) + head.log_mass(s);
  }
};

/// `take(token, attention)` for every token: of its entry's probability the share
/// exp(ℓ_t) / Σ exp(ℓ), the group's heads combined token by token. Shared entries need the
/// query: `observed` has one where there are any.
template <kv_head Head, class State, class Take>
void each_token_attention(const Head& head, const ems_logits<Head, State>& logits,
                          const ems_table<head_state>& table, const observation& observed,
                          group_combine how, Take take) {
  const index_t n = head.length(), group = head.group();
  const auto slope = table.scratch().data(), log_sum = slope + group;
  for (index_t s = 0; s < n; ++s) {
    if (!table.shared(s)) {
      take(s, observed.attention[as_size(s)]);
      continue;
    }
    const auto query = [&](index_t g) { return observed.query + std::ptrdiff_t{g} * head.dim(); };
    for (index_t g = 0; g < group; ++g) {
      slope[g] = logits.slope(s, score::dot(row<const float>{query(g)}, head.key(s), head.dim()));
      log_sum[g] = logits.log_sum(s, query(g), slope[g]);
    }
    table.each(s, [&](index_t token) {
      float attention = 0;
      for (index_t g = 0; g < group; ++g) {
        const float entry = observed.probabilities[as_size(g) * as_size(n) + as_size(s)];
        const float own = entry * std::exp(logits(s, token, query(g), slope[g]) - log_sum[g]);
        attention = how == group_combine::max ? std::max(attention, own) : attention + own;
      }
      take(token, how == group_combine::mean ? attention / static_cast<float>(group) : attention);
    });
  }
}

/// `take(query, token, attention)` for reference queries, one after another: what `column_scores`
/// sums, where entries are shared. An entry is seen from its centre's position on.
template <kv_head Head, class Take>
void each_token_attention(const Head& head, const ems_mass<Head>& mass,
                          const ems_table<head_state>& table, const query_view<float>& queries,
                          group_combine how, Take take) {
  const auto n = as_size(head.length()), group = as_size(head.group()), dim = as_size(head.dim());
  std::vector<float> query(group * dim), p(group * n), combined(n);
  for (index_t i = 0; i < queries.count; ++i) {
    const index_t position = queries.position_of(i, head.next_position());
    for (std::size_t g = 0; g < group; ++g) {
      float* q = query.data() + g * dim;
      std::copy_n(queries.at(static_cast<index_t>(g), i), dim, q);
      const auto logits = std::span(p).subspan(g * n, n);
      for (std::size_t s = 0; s < n; ++s) {
        const auto slot = static_cast<index_t>(s);
        const bool visible = head.sees(slot, position);
        logits[s] = visible
                        ? mass(slot, score::dot(row<const float>{q}, head.key(slot), head.dim()), q)
                        : -std::numeric_limits<float>::infinity();
      }
      Eigen::Map<Eigen::ArrayXf> of_query(logits.data(), head.length());
      score::softmax<> all = mass.logits.terms().sink(static_cast<index_t>(g));
      all.take(of_query);
      of_query /= all.sum > 0 ? all.sum : 1.0F;  // a query that sees nothing adds nothing
    }
    score::combine_group(p, head.group(), how, combined);
    each_token_attention(head, mass.logits, table,
                         {.probabilities = p, .query = query.data(), .attention = combined}, how,
                         [&](index_t token, float attention) { take(i, token, attention); });
  }
}

/// Token ↦ max(s_glo · `scale`, s_past + s_current), and the same of a slot's own token.
template <class State>
struct global_local_score {
  using t = ems_table<State>;
  t table;
  float scale;

  float operator()(index_t token) const {
    return std::max(table.at(t::all, token) * scale,
                    table.at(t::past, token) + table.at(t::current, token));
  }
  float of_slot(index_t s) const {
    return std::max(table.of_slots(t::all)[s] * scale,
                    table.of_slots(t::past)[s] + table.of_slots(t::current)[s]);
  }
};

/// Eq. 2, token ↦ score: s = max(s_glo · mean(s_loc)/mean(s_glo), s_loc), s_loc = past + current;
/// the means over all tokens held. NaN counts for its own token only.
template <class State>
auto global_local(const ems_table<State>& table, index_t length) {
  using t = ems_table<State>;
  double all = 0, in_windows = 0;
  for (index_t s = 0; s < length; ++s) {
    table.each(s, [&](index_t token) {
      const float glo = table.at(t::all, token),
                  loc = table.at(t::past, token) + table.at(t::current, token);
      if (!std::isnan(glo + loc)) {
        all += double{glo};
        in_windows += double{loc};
      }
    });
  }
  const auto scale = static_cast<float>(all > 0 ? in_windows / all : 0.0);
  return global_local_score<State>{table, scale};
}

/// After a prompt: `score` averaged over `kernel` neighbours in position, among the tokens outside
/// the window. By token, `[table.names()]`.
template <class State, class Score>
std::vector<float> pooled_scores(const kv_head auto& head, const ems_table<State>& table,
                                 Score score, index_t window, index_t kernel) {
  std::vector<float> s(as_size(table.names()));
  std::vector<index_t> outside;
  const auto in_window = search::protect(head, 0, window);
  for (index_t slot = 0; slot < head.length(); ++slot) {
    table.each(slot, [&](index_t token) {
      s[as_size(token)] = score(token);
      if (!in_window(table.position(head, token))) {
        outside.push_back(token);
      }
    });
  }
  std::vector<detail::keyed_slot> keyed;
  detail::sort_slots(
      outside, [&](index_t token) { return detail::ascending(table.position(head, token)); },
      keyed);
  score::average_pool(outside, kernel, false, s);
  return s;
}

/// Slot ↦ the sum of its tokens' scores.
template <class State, class Score>
auto entry_weight(const ems_table<State>& tokens, Score score) {
  return [tokens, score](index_t s) {
    float sum = 0;
    tokens.each(s, [&](index_t t) { sum += score(t); });
    return sum;
  };
}

}  // namespace detail
}  // namespace kvmeld::inline v0
