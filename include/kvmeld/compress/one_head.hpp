// SPDX-License-Identifier: MIT
/// observe → plan → apply for one head: what a `compressor` is made of, and for who orchestrates.
#pragma once

#include <cstddef>  // std::size_t
#include <optional>
#include <span>

#include "kvmeld/compress/attend.hpp"
#include "kvmeld/compress/checks.hpp"
#include "kvmeld/compress/workspace.hpp"

namespace kvmeld::inline v0 {

/// The state that `p` keeps for one head.
template <policy P>
head_state make_head_state(const P& p, const head_ref& head) {
  traits::validate(p);
  const auto columns = traits::slot_stats(p);
  return {columns, traits::memory(p, head.dim(), head.group(), head.capacity()), head.capacity(),
          p.name(), traits::memory_follows_capacity(p, head.dim(), head.group(), head.capacity())};
}

/// One decode step's attention, from an engine that computes its own.
/// Refused, with nothing changed: probabilities that are not `[group, length]`, a policy that needs
/// the query or the log-sum-exp without it.
template <policy P>
void observe(const P& p, const head_ref& head, head_state& state, workspace& work,
             observation observed) {
  const auto n = static_cast<std::size_t>(head.length()),
             group = static_cast<std::size_t>(head.group());
  const bool given = observed.probabilities.size() == group * n;
  expects(
      given || (observed.probabilities.empty() && !traits::observation_needs_of(p).probabilities),
      "observe: expected probabilities [", group, ", ", n, "], got ", observed.probabilities.size(),
      " floats");
  expects(observed.log_sum_exp.empty() || observed.log_sum_exp.size() == group,
          "observe: expected log_sum_exp [", group, "], got ", observed.log_sum_exp.size(),
          " floats");
  detail::expect_policy(p, state);
  detail::undo unless_done(state);
  state.extend(head.length());
  if (!traits::uses_attention(p)) {
    return unless_done.release();
  }
  observed.attention = observed.probabilities.first(given ? n : 0);
  if (group > 1 && given) {
    work.reserve(head);
    observed.attention =
        score::combine_group(observed.probabilities, head.group(), traits::combine(p),
                             std::span(work.combined).first(n));
  }
  state.count_queries(1);
  traits::observe(p, head, state, observed);
  unless_done.release();
}

/// Reference queries, from an engine that has no probabilities. A prompt may come in chunks:
/// observe each chunk's own queries after its tokens were appended, with `before` set.
/// Refused, with nothing changed: null queries, less than none,
/// NaN or Inf where the head checks for them.
template <policy P, class Query>
void observe(const P& p, const head_ref& head, head_state& state,
             const query_view<Query>& queries) {
  expects(queries.count >= 0, "observe: expected at least 0 queries, got ", queries.count);
  const bool measured = queries.count > 0 && (traits::uses_attention(p) || traits::uses_queries(p));
  detail::expect_policy(p, state);
  detail::expect_queries("observe: expected finite queries", p, head, queries);
  detail::undo unless_done(state);
  state.extend(head.length());
  if (measured) {
    state.count_queries(queries.count);
    traits::observe(p, head, state, queries);
  }
  unless_done.release();
}

/// Brings one head to `b.slots` slots, as it is measured so far; `queries` are for policies that
/// plan on them. Refused, with nothing changed: a budget that does not fit, missing queries,
/// NaN or Inf where the head checks for them.
template <policy P, class Query = float>
void compress(const P& p, const head_ref& head, head_state& state, workspace& work, const budget& b,
              const query_view<Query>& queries = {}) {
  check(p, b, head.capacity());
  detail::expect_policy(p, state);
  detail::expect_measured(p, head, state, queries.count > 0, b);
  detail::expect_queries("compress: expected finite queries", p, head, queries);
  detail::undo unless_planned(state);
  state.extend(head.length());
  if (head.length() > b.slots) {
    plan(p, head, state, queries, b.slots, work.scratch, work.plan);
    apply(p, work.plan, head, state, work.scratch);
  }
  unless_planned.release();
  traits::after_compress(p, head, state, b.slots);
}

/// One decode step of one head: append, attend, observe, return to the budget. `q`, `out`
/// `[group, dim]`; `k`, `v` `[dim]`. Nothing is allocated, save by a workspace that has
/// not been reserved for such a head; when one slot is removed, the new token takes its place.
/// False: the output is not finite (NaN or Inf came in, or were in the head); the head and its
/// state are as they were.
template <policy P>
bool try_step(const P& p, const head_ref& head, head_state& state, workspace& work, const float* q,
              const float* k, const float* v, const budget& b, float* out) {
  if (!detail::all_finite(q, head.group() * head.dim()) || !detail::all_finite(k, head.dim()) ||
      !detail::all_finite(v, head.dim())) {
    return false;
  }
  work.reserve(head);
  const index_t known = state.length();
  head.push(k, v);
  state.extend(head.length());
  const auto probabilities = traits::uses_attention(p)
                                 ? std::span(work.attention)
                                       .first(static_cast<std::size_t>(head.group()) *
                                              static_cast<std::size_t>(head.length()))
                                 : std::span<float>();
  const auto log_sum_exp =
      std::span(work.log_sum_exp)
          .first(probabilities.empty() ? 0 : static_cast<std::size_t>(head.group()));
  const bool full = traits::evicts(p) && b.reached(head.length());
  const bool removes_one = full && head.length() == b.slots + 1;
  work.comparison.reset();
  if (removes_one) {
    traits::predict_victim(p, head, state, b.slots, work.comparison);
  }
  traits::attend(p, head, state, q, out, probabilities, log_sum_exp, &work.comparison);
  if (!detail::all_finite(out, head.group() * head.dim())) {
    head.restore(head.length() - 1, head.next_position() - 1);
    state.truncate(known);
    return false;
  }
  if (!probabilities.empty()) {
    observe(p, head, state, work,
            {.probabilities = probabilities, .log_sum_exp = log_sum_exp, .query = q});
  }
  if (full) {
    const auto one = removes_one ? traits::choose_victim(p, head, state, b.slots, work.comparison)
                                 : std::nullopt;
    if (one) {
      apply(p, *one, head, state, work.scratch);
    } else {
      plan(p, head, state, b.slots, work.scratch, work.plan);
      apply(p, work.plan, head, state, work.scratch);
    }
  }
  if (head.length() <= b.slots) {
    traits::after_compress(p, head, state, b.slots);
  }
  return true;
}

/// The same for who wants NaN and Inf refused (`not_finite`), with nothing changed.
template <policy P>
void step(const P& p, const head_ref& head, head_state& state, workspace& work, const float* q,
          const float* k, const float* v, const budget& b, float* out) {
  expects(errc::not_finite, try_step(p, head, state, work, q, k, v, b, out), p.name(),
          ": step: expected finite rows, got NaN or Inf");
}

/// One token's rows of every active head, in the order in which the heads are chosen. Each in
/// float, half or bfloat16: what came from the cache's own scalar is stored as it was.
struct step_input {
  any_span q;  ///< [heads, group, dim], rotated
  any_span k;  ///< [heads, dim], rotated
  any_span v;  ///< [heads, dim]
};

}  // namespace kvmeld::inline v0
