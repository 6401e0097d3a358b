// SPDX-License-Identifier: MIT
/// observe → plan → apply, and the two entry points that most engines need: `compress` after a
/// prompt, `step` for one decoded token.
#pragma once

#include <optional>
#include <span>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/executor.hpp"
#include "kvmeld/state.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

inline void expect_workers(const char* what, const state& state, index_t workers) {
  expects(workers > 0 && workers <= state.workers(), what, ": expected 1 to ", state.workers(),
          " workers (those of the state), got ", workers);
}

/// What every call over heads refuses first: policies, states or workers that are too few, heads
/// that are not there, a state made for something else.
template <policies P>
void expect_call(const char* what, const P& p, kv_cache auto& kv, state& state,
                 const head_selection& heads, index_t workers) {
  expects(state.heads() == kv.heads(), what, ": expected a state of ", kv.heads(), " heads, got ",
          state.heads());
  expect_per_head(what, "policies", p, kv.heads());
  expect_workers(what, state, workers);
  heads.check(what, kv.heads());
  for (index_t i = 0; i < heads.count(); ++i) {
    expect_state(for_head(p, heads[i]), kv.head(heads[i]), state[heads[i]]);
  }
}

}  // namespace detail

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
