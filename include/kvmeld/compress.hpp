/// observe → plan → apply, and the two entry points that most engines need: `compress` after a
/// prompt, `step` for one decoded token.
#pragma once

#include <optional>
#include <span>

#include "kvmeld/attend.hpp"
#include "kvmeld/executor.hpp"
#include "kvmeld/heads.hpp"

namespace kvmeld {
inline namespace v0 {

/// The state that `p` keeps for one head.
template <policy P>
head_state make_head_state(const P& p, const kv_head auto& head) {
  traits::validate(p);
  const auto columns = traits::columns(p);
  return {columns, traits::memory(p, head.dim(), head.group(), head.capacity()), head.capacity(),
          p.name()};
}

/// The state for every head of `kv`, and a workspace for every worker of `run`. All that is ever
/// allocated for decoding.
template <policies P, executor E = serial>
state make_state(const P& p, kv_cache auto& kv, const E& run = {}) {
  detail::expect_per_head("make_state", "policies", p, kv.heads());
  std::vector<head_state> heads;
  const index_t workers = run.workers();
  expects(workers > 0, "make_state: expected at least 1 worker, got ", workers);
  std::vector<workspace> work(static_cast<std::size_t>(workers));
  for (index_t h = 0; h < kv.heads(); ++h) {
    heads.push_back(make_head_state(detail::for_head(p, h), kv.head(h)));
    for (workspace& w : work) {
      w.reserve(kv.head(h));
    }
  }
  return {std::move(heads), std::move(work)};
}

// ---------------------------------------------------------------------------- observe

/// One decode step's attention, from an engine that computes its own.
/// Refused, with nothing changed: probabilities that are not `[group, length]`, a policy that needs
/// the query or the log-sum-exp without it.
template <policy P>
void observe(const P& p, const kv_head auto& head, head_state& state, workspace& work,
             observation observed) {
  const auto n = static_cast<std::size_t>(head.length()),
             group = static_cast<std::size_t>(head.group());
  expects(observed.probabilities.size() == group * n, "observe: expected probabilities [", group,
          ", ", n, "], got ", observed.probabilities.size(), " floats");
  expects(observed.log_sum_exp.empty() || observed.log_sum_exp.size() == group,
          "observe: expected log_sum_exp [", group, "], got ", observed.log_sum_exp.size(),
          " floats");
  detail::expect_policy(p, state);
  detail::undo unless_done(state);
  state.extend(head.length());
  if (!traits::measures(p)) {
    return unless_done.release();
  }
  observed.attention = observed.probabilities.first(n);
  if (group > 1) {
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
/// Refused, with nothing changed: null queries, less than none.
template <policy P, class Query>
void observe(const P& p, const kv_head auto& head, head_state& state,
             const query_view<Query>& queries) {
  expects(queries.count >= 0, "observe: expected at least 0 queries, got ", queries.count);
  const bool measured = queries.count > 0 && (traits::measures(p) || traits::plans_on_queries(p));
  detail::expect_policy(p, state);
  expects(!measured || queries.data != nullptr, "observe: expected queries, got null");
  detail::undo unless_done(state);
  state.extend(head.length());
  if (measured) {
    state.count_queries(queries.count);
    traits::observe(p, head, state, queries);
  }
  unless_done.release();
}

/// Reference queries of the heads chosen, `[heads, ...]` in their order, as each chunk of a prompt
/// gives them. Nothing is compressed.
/// Refused, with nothing changed: null queries, a state of another kind, NaN or Inf where the cache
/// checks for them.
template <policies P, class Query, executor E = serial>
void observe(const P& p, kv_cache auto& kv, state& state, const head_selection& heads,
             const query_view<Query>& queries, const E& run = {}) {
  detail::expect_call("observe", p, kv, state, heads, run.workers());
  expects(queries.count >= 0, "observe: expected at least 0 queries, got ", queries.count);
  for (index_t i = 0; i < heads.count(); ++i) {
    const index_t h = heads[i];
    detail::expect_queries("observe: expected finite queries", detail::for_head(p, h), kv.head(h),
                           queries.of(i));
  }
  run(heads.count(), [&](index_t i, index_t) {
    const index_t h = heads[i];
    if (kv.head(h).length() > 0) {
      observe(detail::for_head(p, h), kv.head(h), state[h], queries.of(i));
    }
  });
}

/// The same for all heads.
template <policies P, class Query, executor E = serial>
void observe(const P& p, kv_cache auto& kv, state& state, const query_view<Query>& queries,
             const E& run = {}) {
  observe(p, kv, state, head_range{0, kv.heads()}, queries, run);
}

// ---------------------------------------------------------------------------- compress

/// Brings one head to `b.slots` slots, as it is measured so far; `queries` are for policies that
/// plan on them.
template <policy P, class Query = float>
void compress(const P& p, const kv_head auto& any, head_state& state, workspace& work,
              const budget& b, const query_view<Query>& queries = {}) {
  const auto& head = detail::erased(any);
  check(p, b, head.capacity());
  detail::expect_policy(p, state);
  detail::expect_measured(p, head, state, queries.count > 0, b);
  detail::undo unless_planned(state);
  state.extend(head.length());
  if (head.length() > b.slots) {
    plan(p, head, state, queries, b.slots, work.scratch, work.plan);
    unless_planned.release();
    apply(p, work.plan, head, state, work.scratch);
  }
  unless_planned.release();
  traits::after_compress(p, head, state, b.slots);
}

/// After a prompt: measures the heads chosen on `queries`, `[heads, ...]` in their order, and
/// brings each to `b.slots` slots. `p` and `b`: one for all heads, or a span with one per head of
/// the cache. `queries`: `no_queries` for policies that measure nothing, or when `observe` was
/// called before. `run`: the caller's executor; any number of workers gives the same bits. Refused,
/// with nothing changed: heads that are not there or come twice, budgets that do not fit, missing
/// queries, sizes that do not match.
template <policies P, class Query, budgets B, executor E = serial>
void compress(const P& p, kv_cache auto& kv, state& state, const head_selection& heads,
              const query_view<Query>& queries, const B& b, const E& run = {}) {
  detail::expect_call("compress", p, kv, state, heads, run.workers());
  detail::expect_per_head("compress", "budgets", b, kv.heads());
  const bool given = queries.count > 0 && queries.data != nullptr;
  for (index_t i = 0; i < heads.count(); ++i) {
    const index_t h = heads[i];
    const auto& policy = detail::for_head(p, h);
    check(policy, detail::for_head(b, h), kv.head(h).capacity());
    detail::expect_measured(policy, kv.head(h), state[h], given, detail::for_head(b, h));
    detail::expect_queries("compress: expected finite queries", policy, kv.head(h), queries.of(i));
  }
  run(heads.count(), [&](index_t i, index_t worker) {
    const index_t h = heads[i];
    const auto& policy = detail::for_head(p, h);
    if (kv.head(h).length() > 0) {
      observe(policy, kv.head(h), state[h], queries.of(i));
      compress(policy, kv.head(h), state[h], state.workspace(worker), detail::for_head(b, h),
               queries.of(i));
    }
  });
}

/// The same for all heads.
template <policies P, class Query, budgets B, executor E = serial>
void compress(const P& p, kv_cache auto& kv, state& state, const query_view<Query>& queries,
              const B& b, const E& run = {}) {
  compress(p, kv, state, head_range{0, kv.heads()}, queries, b, run);
}

// ---------------------------------------------------------------------------- step

/// One decode step of one head: append, attend, observe, return to the budget. `q`, `out`
/// `[group, dim]`; `k`, `v` `[dim]`. Nothing is allocated; when one slot is removed, the new
/// token takes its place.
template <policy P>
void step(const P& p, const kv_head auto& any, head_state& state, workspace& work, const float* q,
          const float* k, const float* v, const budget& b, float* out) {
  any.push(k, v);
  const auto& head = detail::erased(any);
  state.extend(head.length());
  const auto probabilities = traits::measures(p)
                                 ? std::span(work.attention)
                                       .first(static_cast<std::size_t>(head.group()) *
                                              static_cast<std::size_t>(head.length()))
                                 : std::span<float>();
  const auto log_sum_exp =
      std::span(work.log_sum_exp)
          .first(probabilities.empty() ? 0 : static_cast<std::size_t>(head.group()));
  const bool full = traits::bounded(p) && b.reached(head.length());
  const bool removes_one = full && head.length() == b.slots + 1;
  work.comparison.reset();
  if (removes_one) {
    traits::predict_victim(p, head, state, b.slots, work.comparison);
  }
  traits::attend(p, head, state, q, out, probabilities, log_sum_exp, &work.comparison);
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
}

/// One token's rows of every active head, in the order in which the heads are chosen. Each in
/// float, half or bfloat16: what came from the cache's own scalar is stored as it was.
struct step_input {
  any_span q;  ///< [heads, group, dim], rotated
  any_span k;  ///< [heads, dim], rotated
  any_span v;  ///< [heads, dim]
};

/// One decode step of the heads chosen: those of one layer, or of the requests that are active.
/// `out` `[heads, group, dim]`; `p`, `b` and `run` as in `compress`.
/// Refused, with nothing changed: heads that are not there or come twice, sizes that do not match,
/// null, no room for the new token, budgets that do not fit, NaN or Inf where the cache checks for
/// them.
template <policies P, budgets B, executor E = serial>
void step(const P& p, kv_cache auto& kv, state& state, const head_selection& heads,
          const step_input& in, const B& b, std::span<float> out, const E& run = {}) {
  detail::expect_call("step", p, kv, state, heads, run.workers());
  detail::expect_per_head("step", "budgets", b, kv.heads());
  const auto any = kv.head(0);
  detail::expect_size("step: expected q", in.q, {heads.count(), any.group(), any.dim()});
  detail::expect_size("step: expected k", in.k, {heads.count(), any.dim()});
  detail::expect_size("step: expected v", in.v, {heads.count(), any.dim()});
  detail::expect_size("step: expected out", out, {heads.count(), any.group(), any.dim()});
  if (any.check_finite()) {
    expect_finite("step: expected finite q", in.q);
    expect_finite("step: expected finite k", in.k);
    expect_finite("step: expected finite v", in.v);
  }
  for (index_t i = 0; i < heads.count(); ++i) {
    const index_t h = heads[i];
    check_step(detail::for_head(p, h), kv.head(h), detail::for_head(b, h));
  }
  const index_t dim = any.dim(), queries = any.group() * dim;
  run(heads.count(), [&](index_t i, index_t worker) {
    const index_t h = heads[i];
    const std::ptrdiff_t row = i;
    workspace& work = state.workspace(worker);
    float* const buffer = work.input.data();
    const float* const q = in.q.floats(row * queries, queries, buffer);
    const float* const k = in.k.floats(row * dim, dim, buffer + queries);
    const float* const v = in.v.floats(row * dim, dim, buffer + queries + dim);
    step(detail::for_head(p, h), kv.head(h), state[h], work, q, k, v, detail::for_head(b, h),
         out.data() + row * queries);
  });
}

/// The same for all heads.
template <policies P, budgets B, executor E = serial>
void step(const P& p, kv_cache auto& kv, state& state, const step_input& in, const B& b,
          std::span<float> out, const E& run = {}) {
  step(p, kv, state, head_range{0, kv.heads()}, in, b, out, run);
}

}  // namespace v0
}  // namespace kvmeld
