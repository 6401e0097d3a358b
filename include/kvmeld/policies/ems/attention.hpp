// SPDX-License-Identifier: MIT
/// Attention over EMS's entries: what their tokens would have done each on its own, from one dot
/// product an entry; and the Global-Local score of them.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::exp, std::log
#include <limits>     // std::numeric_limits
#include <vector>

#include "kvmeld/policies/ems/table.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// scale · q·k̂ of a shared entry from `dot` = q·k: its token `t` has the logit ‖k_t‖ times that.
template <class State>
float ems_slope(const kv_head auto& head, const ems_table<State>& table, index_t s, float dot) {
  const float norm = table.at(ems_table<State>::norm, s);
  return norm > 0 ? head.scale() * dot / norm : 0.0F;
}

/// ln Σ_t exp(cap(slope · ‖k_t‖)) over the tokens of entry `s`.
template <class State>
float ems_log_sum(const ems_table<State>& table, const score::logit_terms& terms, index_t s,
                  float slope) {
  score::softmax<> all;
  table.each(s, [&](index_t token) {
    all.add(terms.cap(slope * table.at(ems_table<State>::norm, token)));
  });
  return all.log_sum_exp();
}

/// The mass function: (slot, q·k) ↦ logit of an entry, from which `attend` makes the sum of its
/// tokens' probabilities.
template <kv_head Head>
struct ems_mass {
  static constexpr bool caps = true;  // each token's own logit
  Head head;
  ems_table<const head_state> table;
  score::logit_terms terms = score::logit_terms(head);

  float operator()(index_t s, float dot) const {
    return table.shared(s) ? ems_log_sum(table, terms, s, ems_slope(head, table, s, dot))
                           : terms.cap(head.scale() * dot) + head.log_mass(s);
  }
};

/// `take(token, attention)` for every token: of its entry's probability the share
/// exp(ℓ_t) / Σ exp(ℓ), the group's heads combined token by token. Shared entries need the
/// query: `observed` has one where there are any.
template <class Take>
void each_token_attention(const kv_head auto& head, const ems_table<head_state>& table,
                          const observation& observed, group_combine how, Take take) {
  const index_t n = head.length(), group = head.group();
  const score::logit_terms terms(head);
  const auto slope = table.scratch().data(), log_sum = slope + group;
  for (index_t s = 0; s < n; ++s) {
    if (!table.shared(s)) {
      take(s, observed.attention[as_size(s)]);
      continue;
    }
    for (index_t g = 0; g < group; ++g) {
      const row<const float> query{observed.query + std::ptrdiff_t{g} * head.dim()};
      slope[g] = ems_slope(head, table, s, score::dot(query, head.key(s), head.dim()));
      log_sum[g] = ems_log_sum(table, terms, s, slope[g]);
    }
    table.each(s, [&](index_t token) {
      const float norm = table.at(ems_table<head_state>::norm, token);
      float attention = 0;
      for (index_t g = 0; g < group; ++g) {
        const float entry = observed.probabilities[as_size(g) * as_size(n) + as_size(s)];
        const float own = entry * std::exp(terms.cap(slope[g] * norm) - log_sum[g]);
        attention = how == group_combine::max ? std::max(attention, own) : attention + own;
      }
      take(token, how == group_combine::mean ? attention / static_cast<float>(group) : attention);
    });
  }
}

/// `take(query, token, attention)` for reference queries, one after another: what `column_scores`
/// sums, where entries are shared. An entry is seen from its centre's position on.
template <class T, class Take>
void each_token_attention(const kv_head auto& head, const head_state& state,
                          const ems_table<head_state>& table, const query_view<T>& queries,
                          group_combine how, Take take) {
  const auto n = as_size(head.length()), group = as_size(head.group()), dim = as_size(head.dim());
  const ems_mass<std::remove_cvref_t<decltype(head)>> mass{head, {state, head.group()}};
  std::vector<float> query(group * dim), p(group * n), combined(n);
  for (index_t i = 0; i < queries.count; ++i) {
    const index_t position = queries.position_of(i, head.next_position());
    for (std::size_t g = 0; g < group; ++g) {
      float* q = query.data() + g * dim;
      const T* from = queries.at(static_cast<index_t>(g), i);
      std::transform(from, from + dim, q, [](T x) { return static_cast<float>(x); });
      const auto logits = std::span(p).subspan(g * n, n);
      for (std::size_t s = 0; s < n; ++s) {
        const auto slot = static_cast<index_t>(s);
        const bool visible = head.sees(slot, position);
        logits[s] = visible
                        ? mass(slot, score::dot(row<const float>{q}, head.key(slot), head.dim()))
                        : -std::numeric_limits<float>::infinity();
      }
      Eigen::Map<Eigen::ArrayXf> of_query(logits.data(), head.length());
      score::softmax<> all = mass.terms.sink(static_cast<index_t>(g));
      all.take(of_query);
      of_query /= all.sum > 0 ? all.sum : 1.0F;  // a query that sees nothing adds nothing
    }
    score::combine_group(p, head.group(), how, combined);
    each_token_attention(head, table,
                         {.probabilities = p, .query = query.data(), .attention = combined}, how,
                         [&](index_t token, float attention) { take(i, token, attention); });
  }
}

/// Eq. 2, token ↦ score: s = max(s_glo · mean(s_loc)/mean(s_glo), s_loc), s_loc = past + current;
/// the means over all tokens held. NaN counts for its own token only.
template <class State>
auto global_local(const ems_table<State>& table, index_t length) {
  using t = ems_table<State>;
  const auto local = [table](index_t token) {
    return table.at(t::past, token) + table.at(t::current, token);
  };
  double all = 0, in_windows = 0;
  for (index_t s = 0; s < length; ++s) {
    table.each(s, [&](index_t token) {
      const float glo = table.at(t::all, token), loc = local(token);
      if (!std::isnan(glo + loc)) {
        all += double{glo};
        in_windows += double{loc};
      }
    });
  }
  const auto scale = static_cast<float>(all > 0 ? in_windows / all : 0.0);
  return [table, local, scale](index_t token) {
    return std::max(table.at(t::all, token) * scale, local(token));
  };
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
