// SPDX-License-Identifier: MIT
/// What a compressor holds, and the work on one head that its calls have in common.
#pragma once

#include <string>
#include <vector>

#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/memory/head_selection.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld::inline v0 {

/// One decode step's attention of the heads chosen, from an engine that computes its own.
struct step_attention {
  /// [heads, group, stride] of the softmax that includes the newest token; the first `length` of
  /// each row are read.
  std::span<const float> probabilities = {};
  index_t stride = 0;                       ///< 0: the longest of the heads' lengths
  std::span<const float> log_sum_exp = {};  ///< [heads, group] of the logits, natural logarithm
  any_span query = {};                      ///< [heads, group, key_dim] rotated, the newest token's
};

namespace detail {

/// Refuses rows of another size than `shape` says, and null: "call: expected what [shape]".
inline void expect_size(const char* call, const char* what, const any_span& x,
                        std::initializer_list<index_t> shape) {
  std::size_t wanted = 1;
  for (const index_t n : shape) {
    wanted *= as_size(n);
  }
  if (x.size() == wanted && (wanted == 0 || x.data() != nullptr)) [[likely]] {
    return;
  }
  std::string axes;
  for (const index_t n : shape) {
    axes += (axes.empty() ? "" : ", ") + std::to_string(n);
  }
  expects(false, call, ": expected ", what, " [", axes, "] (", wanted, " numbers), got ",
          x.size() == wanted ? "null" : std::to_string(x.size()));
}

template <policy P>
class compressor_base {
 protected:
  using lease = workspace_pool::lease;

  /// What is kept of one head.
  struct one_head {
    head_state state;
    budget limit;             ///< while decoding
    index_t gone = 0;         ///< its tokens without a slot, as a call left it
    held_queries held = {};   ///< of a prompt that has begun
    bool not_finite = false;  ///< in the step at hand
  };

  /// Drafted rows of one layer's heads, in floats.
  struct drafted {
    std::vector<index_t> heads;
    index_t tokens = 0;
    std::vector<float> q, k, v;  // [tokens, heads, ...]
  };

  template <kv_cache Cache>
  compressor_base(Cache& kv, std::span<const P> policies, std::span<const budget> budgets,
                  const observation_needs& given)
      : kv_(kv),
        drafts_(as_size(kv_.requests())),
        pool_(kv_.head(0).group(), kv_.head(0).dim(), kv_.head(0).capacity()) {
    expect_one_or_each("policies", policies.data(), policies.size());
    expect_one_or_each("budgets", budgets.data(), budgets.size());
    const auto of = [](const auto& one_or_each, index_t i) {
      return one_or_each[one_or_each.size() == 1 ? 0 : as_size(i)];
    };
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      const budget b = of(budgets, i);
      budgets_.push_back(b);
      expects(b.slack >= 0, "compressor: expected a slack of at least 0 slots, got ", b.slack);
      expects(!b.is_shared || budgets.size() == 1,
              "compressor: expected one shared budget for all heads, got ", budgets.size());
      const P p = of(policies, i);
      traits::validate(p);
      policies_.push_back(b.is_shared ? for_shared(p, b.slots, b.slack) : p);
      check_head(policies_.back(), b, given, kv_.head(kv_.of_request(0, i)).spec());
    }
    heads_.reserve(as_size(kv_.heads()));
    for (index_t h = 0; h < kv_.heads(); ++h) {
      heads_.push_back(
          {make_head_state(policy_of(h), kv_.head(h)), decode_limit(h, budget_of(h).slots)});
      leave(h);
    }
  }

  /// Keeps how many of the head's tokens have no slot, as it is left by a call.
  void leave(index_t h) {
    const head_ref head = kv_.head(h);
    of(h).gone = head.next_position() - head.length();
  }
  /// Refused: a head whose lengths were changed since, but for tokens appended: its state is not of
  /// these slots. Where it ends a prompt, tokens may have been taken away again, as those of a
  /// second reading (kvzip).
  void expect_left(const char* call, index_t h, bool ends_prompt = false) const {
    const head_ref head = kv_.head(h);
    const index_t gone = head.next_position() - head.length(), known = of(h).state.length();
    expects(gone == of(h).gone && (head.length() >= known || ends_prompt), call, ": expected head ",
            h, " as it was left (clear, and draft with accept, set it back), got ", head.length(),
            " slots of ", head.next_position(), " tokens, and a state of ", known, " of ",
            known + of(h).gone);
  }
  /// Refused: pages of other tables too, where `tokens` more and the budget change rows.
  void expect_own_pages(const char* call, index_t h, const budget& b, index_t tokens) const {
    if (kv_.in_pages()) {
      const index_t length = kv_.head(h).length(), last = length + tokens;
      const bool plans = traits::evicts(policy_of(h)) && b.reached(last);
      kv_.expect_own_pages(call, h, plans ? 0 : length, last);
    }
  }
  /// After a call that may have freed pages of `n` heads.
  void count_pages(index_t n, auto head_of) const {
    for (index_t i = 0; i < n; ++i) {
      kv_.count_pages(head_of(i));
    }
  }
  void expect_head(const char* call, index_t h) const {
    expects(h >= 0 && h < kv_.heads(), call, ": expected a head from 0 to ", kv_.heads() - 1,
            ", got ", h);
  }

  const P& policy_of(index_t head) const { return policies_[as_size(kv_.in_request(head))]; }
  const budget& budget_of(index_t head) const { return budgets_[as_size(kv_.in_request(head))]; }
  one_head& of(index_t head) { return heads_[as_size(head)]; }
  const one_head& of(index_t head) const { return heads_[as_size(head)]; }

  void expect_one_or_each(const char* what, const void* data, std::size_t count) const {
    expects(data != nullptr || count == 0, "compressor: expected ", what, ", got null");
    expects(count == 1 || count == as_size(kv_.per_request()), "compressor: expected ", what,
            ": one, or one for each of ", kv_.per_request(), " heads of a request, got ", count);
  }
  /// The heads of a request. Refused: a request that is not there.
  std::vector<index_t> heads_of(const char* call, index_t request) const {
    expects(request >= 0 && request < kv_.requests(), call, ": expected a request of 0 to ",
            kv_.requests() - 1, ", got ", request);
    std::vector<index_t> heads(as_size(kv_.per_request()));
    for (index_t i = 0; index_t & h : heads) {
      h = kv_.of_request(request, i++);
    }
    return heads;
  }
  void expect_between(const char* call, index_t request) const {
    for (const index_t h : heads_of(call, request)) {
      expects(!of(h).held.begun(), call,
              ": expected end_prompt first, got a prompt that has not ended");
      expect_left(call, h);
    }
    expects(drafts_[as_size(request)].empty(), call, ": expected accept first, got a draft");
  }

  static void expect_given(const char* call, const P& p, const observation_needs& given) {
    const observation_needs needs = traits::observation_needs_of(p);
    const auto expect = [&](const char* what, bool needed, bool has) {
      expects(!needed || has, call, ": expected the step's ", what, " (", p.name(),
              " needs it), got none");
    };
    expect("probabilities", needs.probabilities, given.probabilities);
    expect("log_sum_exp", needs.log_sum_exp, given.log_sum_exp);
    expect("query", needs.query, given.query);
  }

  void check_head(const P& p, const budget& b, const observation_needs& given,
                  const attention_spec& spec) const {
    expect_attention("compressor: ", p, spec);
    const index_t capacity = kv_.head(0).capacity();
    check(p, {b.slots, b.trigger}, capacity);
    if (!traits::evicts(p)) {
      return;
    }
    if (traits::supports_decode(p)) {
      expect_given("compressor", p, given);
      expects(errc::no_capacity, std::int64_t{b.slots} + b.slack < capacity,
              "compressor: expected a capacity of at least ", std::int64_t{b.slots} + b.slack + 1,
              " slots (budget, slack and the new token), got ", capacity);
    }
  }

  /// What a head of `slots` slots after its prompt is held to while decoding.
  budget decode_limit(index_t h, index_t slots) const {
    const budget& b = budget_of(h);
    if (b.trigger > 0) {
      return {slots, std::max(b.trigger, slots + 1)};
    }
    return budget_within(policy_of(h), std::min(slots + b.slack, kv_.head(h).capacity() - 1));
  }

  /// Slots for each of the request's heads, by one threshold over their scores.
  std::vector<index_t> divided(const std::vector<index_t>& heads) {
    for (const index_t h : heads) {
      expect_left("end_prompt", h, of(h).held.begun());
    }
    const budget& b = budgets_.front();
    const auto shared = shared_slots::of(policies_.front());
    std::vector<std::vector<float>> scores;
    index_t longest = 0;
    for (const index_t h : heads) {
      const head_ref head = kv_.head(h);
      longest = std::max(longest, head.length());
      of(h).state.extend(head.length());  // tokens that came without queries have no score
      add_shared_scores(head, of(h).state.column(shared.column), shared, scores.emplace_back());
    }
    return divide_slots(scores, shared, b.slots, longest);
  }

  /// Before head `h` is brought to budget `b`.
  void expect_prompt(const char* call, index_t h, const budget& b) const {
    expect_left(call, h, of(h).held.begun());
    expect_own_pages(call, h, b, 0);
    const index_t slots = b.slots;
    expects(kv_.head(h).length() <= slots || !traits::evicts(policy_of(h)) ||
                !traits::prompt_use_of(policy_of(h)).needs_queries() || of(h).held.begun() ||
                of(h).state.observed() > 0,
            policy_of(h).name(), ": expected the prompt's queries, got none");
  }

  /// Plans a head's prompt on what was kept of its queries, and holds it to `slots` from now on.
  void finish(index_t h, index_t slots, workspace& work) {
    const P& p = policy_of(h);
    const head_ref head = kv_.head(h);
    auto& [state, limit, gone, held, not_finite] = of(h);
    if (head.length() > 0) {
      const auto queries = planned_queries(p, head, state, held);
      compress(p, head, state, work, budget{slots}, queries);
    }
    limit = decode_limit(h, slots);
    gone = head.next_position() - head.length();
    held.release();
  }

  /// `tokens` rows of the heads chosen, `[tokens, heads, ...]`. Refused: heads that are not there
  /// or come twice, rows of another size, null.
  void expect_rows(const char* call, const head_selection& heads, const step_input& in,
                   std::span<float> out, index_t tokens) const {
    heads.check(call, kv_.heads());
    const index_t n = heads.count(), group = kv_.head(0).group(), dim = kv_.head(0).dim();
    expect_size(call, "q", in.q, {tokens, n, group, dim});
    expect_size(call, "k", in.k, {tokens, n, 1, dim});
    expect_size(call, "v", in.v, {tokens, n, 1, dim});
    expect_size(call, "out", out, {tokens, n, group, dim});
    const any_span written(out);
    expects(!written.overlaps(in.q) && !written.overlaps(in.k) && !written.overlaps(in.v), call,
            ": expected out in memory of its own, got that of q, k or v");
  }
  /// A prompt's queries: of the heads chosen, no more than tokens, finite where a head checks.
  void expect_queries(const head_selection& heads, const queries& q) const {
    heads.check("prompt", kv_.heads());
    expects(heads.count() == q.kv_heads(), "prompt: expected queries of ", heads.count(),
            " KV heads, got ", q.kv_heads());
    for (index_t i = 0; i < heads.count(); ++i) {
      const head_ref head = kv_.head(heads[i]);
      expects(kv_.together(heads[i], heads[0]),
              "prompt: expected heads of one layer and request, got heads ", heads[0], " and ",
              heads[i]);
      expect_left("prompt", heads[i]);
      expects(head.group() == q.group() && head.dim() == q.dim(), "prompt: expected queries of [",
              head.group(), ", ", head.dim(), "] per KV head, got [", q.group(), ", ", q.dim(),
              "]");
      expects(q.tokens() <= head.next_position(), "prompt: expected at most ", head.next_position(),
              " queries (the tokens appended), got ", q.tokens());
      if (head.check_finite()) {
        expect_finite("prompt: expected finite queries", q.rows());
      }
    }
  }
  /// Refuses a step that some heads have not made, and names them.
  void expect_finite_steps(const head_selection& heads) const {
    std::string marked;
    for (index_t i = 0; i < heads.count(); ++i) {
      if (of(heads[i]).not_finite) {
        marked += (marked.empty() ? "" : ", ") + std::to_string(heads[i]);
      }
    }
    expects(errc::not_finite, marked.empty(), "step: expected finite rows, got NaN or Inf in head ",
            marked, " (as it was; all other heads have made their step)");
  }

  cache_ref kv_;
  std::vector<P> policies_;      // [layers · kv_heads], of a request
  std::vector<budget> budgets_;  // the same
  std::vector<one_head> heads_;
  std::vector<std::vector<drafted>> drafts_;  // [requests]
  workspace_pool pool_;
};

}  // namespace detail
}  // namespace kvmeld::inline v0
