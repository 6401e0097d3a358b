// SPDX-License-Identifier: MIT
/// observe → plan → apply for one head, and what these refuse first: what `compressor` is made of.
#pragma once

#include <algorithm>  // std::min, std::copy_n, std::ranges::copy
#include <limits>     // std::numeric_limits
#include <span>

#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/policies/declared.hpp"
#include "kvmeld/score/attention.hpp"

namespace kvmeld::inline v0 {

/// The state that `p` keeps for one head.
template <policy P>
head_state make_head_state(const P& p, const head_ref& head) {
  declared(p).validate();
  const auto columns = declared(p).slot_stats();
  const index_t dim = head.row_dim(), group = head.group(), capacity = head.capacity();
  return {columns, declared(p).memory(dim, group, capacity), capacity, p.name(),
          declared(p).memory_follows_capacity(dim, group, capacity)};
}

namespace detail {

/// Does the policy take anything of reference queries?
template <policy P>
bool measures(const P& p) {
  return declared(p).uses_attention() || declared(p).uses_queries() ||
         declared(p).prompt_use().observes;
}

/// Queries of one head as a policy gets them: finite, where the cache checks for it. Of heads of
/// several lengths that are given equally many, the first lie before position 0 and see nothing;
/// `compressor::prompt` refuses more than there are tokens.
template <policy P, class Query>
void expect_queries(const char* expected, const P& p, const head_ref& head,
                    const query_view<Query>& queries) {
  if (queries.count == 0 || !measures(p)) {
    return;
  }
  expects(queries.data != nullptr, expected, ", got null");
  if (head.check_finite()) {
    const auto all = queries.reference(queries.count + queries.before);
    for (index_t i = 0; i < all.count; ++i) {
      for (index_t g = 0; g < head.group(); ++g) {
        kvmeld::expect_finite(expected, std::span(all.at(g, i), as_size(head.dim())));
      }
    }
  }
}

}  // namespace detail

/// Throws unless `compress` can bring `head` to `b`: a budget that fits the policy and the
/// capacity, a state of the policy's, and what the policy decides on. `queries`: will it be given
/// any?
template <policy P>
void check_compress(const P& p, const head_ref& head, const head_state& state, const budget& b,
                    bool queries) {
  check(p, b, head.capacity());
  detail::expect_state(p, head, state);
  if (head.length() > b.slots && declared(p).evicts()) {
    const bool observed =
        state.observed() > 0 && !(state.rests() && declared(p).decode_use().steps > 0);
    expects(
        !(declared(p).uses_attention() || declared(p).prompt_use().observes) || queries || observed,
        p.name(), ": expected reference queries or observed attention");
    expects(!declared(p).uses_queries() || declared(p).supports_decode() || queries, p.name(),
            ": expected reference queries");
  }
}

/// Throws unless one more token fits into `head`, under a budget that was checked before.
template <policy P>
void check_token(const P& p, const head_ref& head) {
  expects(errc::unsupported, declared(p).supports_decode(), p.name(),
          ": expected a policy that decodes (full_cache or another), got one for prompts only");
  expects(errc::no_capacity, head.length() < head.capacity(), p.name(),
          ": expected a free slot for the token, got all ", head.capacity(), " slots in use");
  head.expect_pages(head.length(), head.length() + 1);
  expects(errc::no_capacity, head.next_position() < std::numeric_limits<index_t>::max(), p.name(),
          ": expected fewer than ", std::numeric_limits<index_t>::max(), " tokens in total, got ",
          head.next_position());
}

/// Throws unless one more token fits into `head` under `b`.
template <policy P>
void check_step(const P& p, const head_ref& head, const budget& b) {
  check(p, b, head.capacity());
  check_token(p, head);
  expects(!declared(p).evicts() || b.trigger_length() <= head.capacity(), p.name(),
          ": expected a capacity of at least ", b.trigger_length(),
          " slots (budget and new token), got ", head.capacity());
}

/// One decode step's attention, from an engine that computes its own.
/// Refused, with nothing changed: probabilities that are not `[group, length]`, a policy that needs
/// the query or the log-sum-exp without it.
template <policy P>
void observe(const P& p, const head_ref& head, head_state& state, workspace& work,
             observation observed) {
  const auto n = as_size(head.length()), group = as_size(head.group());
  const bool given = observed.probabilities.size() == group * n;
  expects(given || (observed.probabilities.empty() && !declared(p).needs().probabilities),
          "observe: expected probabilities [", group, ", ", n, "], got ",
          observed.probabilities.size(), " floats");
  expects(observed.log_sum_exp.empty() || observed.log_sum_exp.size() == group,
          "observe: expected log_sum_exp [", group, "], got ", observed.log_sum_exp.size(),
          " floats");
  detail::expect_state(p, head, state);
  detail::undo unless_done(state);
  state.extend(head.length());
  if (!declared(p).uses_attention()) {
    return unless_done.release();
  }
  observed.attention = observed.probabilities.first(given ? n : 0);
  if (group > 1 && given) {
    work.reserve(head);
    observed.attention =
        score::combine_group(observed.probabilities, head.group(), declared(p).combine(),
                             std::span(work.combined).first(n));
  }
  observed.scratch = &work.scratch;
  state.count_queries(1);
  declared(p).observe(head, state, observed);
  unless_done.release();
}

/// Reference queries, from an engine that has no probabilities. A prompt may be given in chunks:
/// observe each chunk's own queries after its tokens were appended, with `before` set. Refused,
/// with nothing changed: null queries, less than none, NaN or Inf where the head checks for them.
template <policy P, class Query>
void observe(const P& p, const head_ref& head, head_state& state,
             const query_view<Query>& queries) {
  expects(queries.count >= 0, "observe: expected at least 0 queries, got ", queries.count);
  detail::expect_state(p, head, state);
  detail::expect_queries("observe: expected finite queries", p, head, queries);
  detail::undo unless_done(state);
  state.extend(head.length());
  if (queries.count > 0 && detail::measures(p)) {
    state.count_queries(queries.count);
    auto wanted = queries;
    if (const prompt_use use = declared(p).prompt_use(); use.latest > 0) {
      wanted.before = std::min(wanted.before, use.reach);
      wanted = wanted.reference(use.latest);
      wanted.before = 0;
    }
    in_floats(wanted, head.group(), head.dim(),
              [&](const query_view<float>& own) { declared(p).observe(head, state, own); });
  }
  unless_done.release();
}

namespace detail {

/// `compress`, but for `after_compress`. What a policy throws here leaves the head as it was.
template <policy P, class Query>
void bring_to(const P& p, const head_ref& head, head_state& state, workspace& work, const budget& b,
              const query_view<Query>& queries) {
  check_compress(p, head, state, b, queries.count > 0);
  detail::expect_queries("compress: expected finite queries", p, head, queries);
  detail::undo unless_planned(state);
  state.extend(head.length());
  if (head.length() > b.slots) {
    plan(p, head, state, queries, b.slots, work.scratch, work.plan);
    apply(p, work.plan, head, state, work.scratch);
  }
  unless_planned.release();
}

}  // namespace detail

/// Brings one head to `b.slots` slots, as it is measured so far; `queries` are for policies that
/// plan on them. Refused, with nothing changed: a budget that does not fit, missing queries,
/// NaN or Inf where the head checks for them.
template <policy P, class Query = float>
void compress(const P& p, const head_ref& head, head_state& state, workspace& work, const budget& b,
              const query_view<Query>& queries = {}) {
  detail::bring_to(p, head, state, work, b, queries);
  declared(p).after_compress(head, state, b.slots);
}

namespace detail {

/// A head before one more token: its lengths, and the newest row that the token takes the place of.
class displaced_row {
 public:
  /// `rows [2, row_dim]`: where to keep it.
  displaced_row(const head_ref& head, Eigen::half* rows)
      : head_(head),
        rows_(rows),
        length_(head.length()),
        next_(head.next_position()),
        rounded_(head.rounded()) {
    if (head.type().newest > 0) {
      std::ranges::copy(row(head.newest_keys()), rows_);
      std::ranges::copy(row(head.newest_values()), rows_ + head.row_dim());
    }
  }
  /// Takes the token back.
  void put_back() const {
    head_.restore(length_, next_, rounded_);
    if (head_.type().newest > 0) {
      const auto key = row(head_.newest_keys()), value = row(head_.newest_values());
      std::copy_n(rows_, key.size(), key.begin());
      std::copy_n(rows_ + head_.row_dim(), value.size(), value.begin());
    }
  }

 private:
  std::span<Eigen::half> row(std::span<Eigen::half> all) const {
    const std::size_t dim = all.size() / as_size(rows_in_half(head_.type().newest));
    return all.subspan(as_size(head_.newest_row(next_)) * dim, dim);
  }

  head_ref head_;
  Eigen::half* rows_;
  index_t length_, next_, rounded_;
};

}  // namespace detail

/// One decode step of one head: append, attend, observe, return to the budget. `q [group, dim]`,
/// `k [dim]`, `v [value_dim]` (in one memory none), `out [group, value_dim]`. Nothing is allocated,
/// save by a workspace that has not been reserved for such a head; slots that stay do not move, so
/// where one is freed the new token takes its place. False: the output is not finite (NaN or Inf
/// in the input or in the head); the head and its state are as they were. A state at rest stays so,
/// without observing, until the head returns to the budget.
template <policy P>
bool try_step(const P& p, const head_ref& head, head_state& state, workspace& work, const float* q,
              const float* k, const float* v, const budget& b, float* out) {
  if (!detail::all_finite(q, head.group() * head.dim()) || !detail::all_finite(k, head.dim()) ||
      !detail::all_finite(v, head.own_value_dim())) {
    return false;
  }
  detail::expect_state(p, head, state);
  work.reserve(head);
  const index_t known = state.length();
  const detail::displaced_row displaced(head, work.displaced.data());
  head.push(k, v);
  const bool plans = declared(p).evicts() && b.reached(head.length());
  if (!state.rests() || plans) {
    state.extend(head.length());
  }
  const auto probabilities =
      declared(p).uses_attention() && !state.rests()
          ? std::span(work.attention).first(as_size(head.group(), head.length()))
          : std::span<float>();
  const auto log_sum_exp =
      std::span(work.log_sum_exp).first(probabilities.empty() ? 0 : as_size(head.group()));
  declared(p).attend(head, state, q, out, probabilities, log_sum_exp);
  if (!detail::all_finite(out, head.group() * head.value_dim())) {
    displaced.put_back();
    state.truncate(known);
    return false;
  }
  if (!probabilities.empty()) {
    observe(p, head, state, work,
            {.probabilities = probabilities, .log_sum_exp = log_sum_exp, .query = q});
  }
  if (plans) {
    plan(p, head, state, b.slots, work.scratch, work.plan);
    apply(p, work.plan, head, state, work.scratch);
  }
  if (head.length() <= b.slots && !state.rests()) {
    declared(p).after_compress(head, state, b.slots);
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

/// Empties one head and its state: the next token is at position 0. Nothing is allocated or freed;
/// the pages of a head in pages stay in its table.
inline void clear(const head_ref& head, head_state& state) {
  head.restore(0, 0);
  state.clear();
}

namespace detail {

/// Throws where `copy` would.
inline void expect_copy(const head_ref& from, const head_state& from_state, const head_ref& to,
                        const head_state& to_state) {
  expects(from.dim() == to.dim(), "copy: expected a head of dim ", from.dim(), ", got ", to.dim());
  expects(from.value_dim() == to.value_dim(), "copy: expected a head of value_dim ",
          from.value_dim(), ", got ", to.value_dim());
  expects(from.one_memory() || !to.one_memory(),
          "copy: expected a head with memory for values, got one whose values are in its keys");
  expects(errc::no_capacity, from.length() <= to.capacity(), "copy: expected a head of at least ",
          from.length(), " slots, got ", to.capacity());
  to.expect_pages(0, from.length());
  to_state.expect_copy(from_state);
}

}  // namespace detail

/// Makes `to` what `from` is: rows, log-mass, positions, lengths, state. Nothing is allocated. In
/// another storage every row is rounded once: a prompt compressed in floats can be held in `q8_0`.
/// The capacities may differ, but for `ems`, whose memory is laid out for one.
///
/// A row that lies at the same place in both heads is not copied, as where page tables share a
/// prefix. Heads that share rows overwrite one another when they are compressed: give one of them
/// pages of its own before.
/// Refused, with nothing changed: another dim, too few slots (`no_capacity`), pages that the table
/// of `to` lacks (`no_page`), a state of another kind.
inline void copy(const head_ref& from, const head_state& from_state, const head_ref& to,
                 head_state& to_state) {
  detail::expect_copy(from, from_state, to, to_state);
  to_state.copy(from_state);
  detail::copy_slots(from, to);
}

/// One token's rows of every active head, in the order in which the heads are chosen. Each in
/// float, half or bfloat16: numbers in the cache's own scalar are stored as they are.
struct step_input {
  any_span q;  ///< [heads, group, key_dim], rotated
  any_span k;  ///< [heads, key_dim], rotated
  any_span v;  ///< [heads, value_dim]; none where values are in the keys (`one_memory`)
  /// [tokens, requests] positions that the engine has rotated the rows to, one for each request
  /// that the heads are of; compared with the heads'. None: each layer takes a token after the
  /// layer before. With them, a layer may take several before the next.
  std::span<const index_t> positions = {};
};

}  // namespace kvmeld::inline v0
