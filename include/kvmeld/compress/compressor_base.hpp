// SPDX-License-Identifier: MIT
/// What a compressor holds, and the work on one head that its calls have in common.
#pragma once

#include <string>
#include <vector>

#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/compress/reuse.hpp"
#include "kvmeld/compress/saved_heads.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/memory/head_selection.hpp"

namespace kvmeld::inline v0::detail {

template <policy P>
class compressor_base {
 protected:
  template <kv_cache Cache>
  compressor_base(Cache& kv, std::span<const P> policies, std::span<const budget> budgets,
                  const observation_needs& given)
      : kv_(kv), pool_(kv_.head(0).group(), kv_.head(0).dim(), kv_.head(0).capacity()) {
    expect_one_or_each("policies", policies.size());
    expect_one_or_each("budgets", budgets.size());
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      const budget& b = of(budgets, i);
      budgets_.push_back(b);
      expects(b.slack >= 0, "compressor: expected a slack of at least 0 slots, got ", b.slack);
      expects(!b.is_shared || budgets.size() == 1,
              "compressor: expected one shared budget for all heads, got ", budgets.size());
      traits::validate(of(policies, i));
      policies_.push_back(b.is_shared ? for_shared(of(policies, i), b.slots, b.slack)
                                      : of(policies, i));
      check_head(policies_.back(), b, given);
    }
    for (index_t h = 0; h < kv_.heads(); ++h) {
      states_.push_back(make_head_state(policy_of(h), kv_.head(h)));
      limits_.push_back(decode_limit(h, budget_of(h).slots));
    }
    held_.resize(states_.size());
    drafts_.resize(static_cast<std::size_t>(kv_.requests()));
    marks_.resize(states_.size());
  }

  using lease = workspace_pool::lease;

  const P& policy_of(index_t head) const { return policies_[at(kv_.in_request(head))]; }

  /// Drafted rows of one layer's heads, in floats.
  struct drafted {
    std::vector<index_t> heads;
    index_t tokens = 0;
    std::vector<float> q, k, v;  // [tokens, heads, ...]
  };

  static std::size_t at(index_t i) { return static_cast<std::size_t>(i); }
  template <class T>
  static const T& of(std::span<const T> one_or_each, index_t i) {
    return one_or_each[one_or_each.size() == 1 ? 0 : at(i)];
  }
  const budget& budget_of(index_t head) const { return budgets_[at(kv_.in_request(head))]; }

  void expect_one_or_each(const char* what, std::size_t count) const {
    expects(count == 1 || count == at(kv_.per_request()), "compressor: expected ", what,
            ": one, or one for each of ", kv_.per_request(), " heads of a request, got ", count);
  }
  void expect_request(const char* call, index_t request) const {
    expects(request >= 0 && request < kv_.requests(), call, ": expected a request of 0 to ",
            kv_.requests() - 1, ", got ", request);
  }
  void expect_between(const char* call, index_t request) const {
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      expects(!held_[at(kv_.of_request(request, i))].begun(), call,
              ": expected end_prompt first, got a prompt that has not ended");
    }
    expects(drafts_[at(request)].empty(), call, ": expected accept first, got a draft");
  }
  void expect_heads(const char* call, const head_selection& heads) {
    heads.check(call, kv_.heads());
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

  void check_head(const P& p, const budget& b, const observation_needs& given) const {
    const head_ref head = kv_.head(0);
    check(p, {b.slots, b.trigger}, head.capacity());
    if (!traits::evicts(p)) {
      return;
    }
    if (traits::supports_decode(p)) {
      expect_given("compressor", p, given);
      expects(errc::no_capacity, std::int64_t{b.slots} + b.slack < head.capacity(),
              "compressor: expected a capacity of at least ", std::int64_t{b.slots} + b.slack + 1,
              " slots (budget, slack and the new token), got ", head.capacity());
    }
    expects(errc::unsupported, !b.is_shared || traits::slot_stat_count(p) > 0,
            "compressor: ", p.name(),
            ": expected a policy with a score per slot for shared budgets, got one without");
  }

  /// What a head of `slots` slots after its prompt is held to while decoding.
  budget decode_limit(index_t h, index_t slots) const {
    const budget& b = budget_of(h);
    const index_t most = kv_.head(h).capacity() - 1;
    if (b.trigger > 0) {
      return {slots, std::max(b.trigger, slots + 1)};
    }
    return budget_within(policy_of(h), std::min(slots + b.slack, most));
  }

  /// Slots for each of the request's heads, by one threshold over their scores.
  std::vector<index_t> divided(const std::vector<index_t>& heads) const {
    const budget& b = budgets_.front();
    const auto shared = shared_slots::of(policies_.front());
    std::vector<std::vector<float>> scores;
    index_t longest = 0;
    for (const index_t h : heads) {
      const head_ref head = kv_.head(h);
      longest = std::max(longest, head.length());
      add_shared_scores(head, states_[at(h)].column(shared.column), shared, scores.emplace_back());
    }
    if (longest <= b.slots) {
      return std::vector<index_t>(heads.size(), b.slots);
    }
    return divide_slots(scores, shared, b.slots - shared.own, longest - shared.own - 1);
  }

  void expect_prompt(index_t h, index_t slots) const {
    const head_ref head = kv_.head(h);
    const prompt_use use = traits::prompt_use_of(policy_of(h));
    expects(head.length() <= slots || !traits::evicts(policy_of(h)) || !use.needs_queries() ||
                held_[at(h)].begun() || states_[at(h)].observed() > 0,
            policy_of(h).name(), ": expected the prompt's queries, got none");
  }

  /// Plans a head's prompt on what was kept of its queries, and holds it to `slots` from now on.
  void finish(index_t h, index_t slots, workspace& work) {
    const head_ref head = kv_.head(h);
    held_queries& held = held_[at(h)];
    const prompt_use use = traits::prompt_use_of(policy_of(h));
    if (held.begun() && use.plans != prompt_use::planned::none) {
      const auto view =
          held.planned(head.spec().rope, head.group(), head.dim(), use, head.next_position());
      if (use.plans != prompt_use::planned::latest) {
        kvmeld::observe(policy_of(h), head, states_[at(h)], view);
      }
      kvmeld::compress(policy_of(h), head, states_[at(h)], work, budget{slots}, view);
    } else if (head.length() > 0) {
      kvmeld::compress(policy_of(h), head, states_[at(h)], work, budget{slots});
    }
    limits_[at(h)] = decode_limit(h, slots);
    held.release();
  }

  /// `tokens` rows of the heads chosen, `[tokens, heads, ...]` where there are several.
  void expect_rows(const char* call, const head_selection& heads, const step_input& in,
                   std::span<float> out, index_t tokens) const {
    const head_ref any = kv_.head(0);
    const index_t n = heads.count(), group = any.group(), dim = any.dim();
    const auto expect = [&](const char* what, const any_span& x, index_t each) {
      const bool fits = x.size() == static_cast<std::size_t>(tokens) *
                                        static_cast<std::size_t>(n * each) *
                                        static_cast<std::size_t>(dim) &&
                        (x.size() == 0 || x.data() != nullptr);
      if (!fits) [[unlikely]] {
        expect_size((std::string(call) + ": expected " + what).c_str(), x, {tokens, n, each, dim});
      }
    };
    expect("q", in.q, group), expect("k", in.k, 1), expect("v", in.v, 1);
    expect("out", out, group);
  }
  void expect_room(const char* call, index_t h, index_t tokens) const {
    const head_ref head = kv_.head(h);
    expects(errc::no_capacity, tokens <= head.capacity() - head.length(), call,
            ": expected room for ", tokens, " tokens, got ", head.capacity() - head.length(),
            " free slots");
  }
  void expect_step(index_t h) const {
    const P& p = policy_of(h);
    const head_ref head = kv_.head(h);
    check_token(p, head);
    expects(!held_[at(h)].begun(),
            "step: expected end_prompt first, got a prompt that has not ended");
    expects(drafts_[at(kv_.request_of(h))].empty(),
            "step: expected accept first, got a draft of the request");
  }

  /// Steps of heads that were checked. Those of NaN stay as they were; all others are made.
  template <class E>
  void step_rows(const head_selection& heads, const step_input& in, std::span<float> out,
                 const E& run) {
    const head_ref any = kv_.head(0);
    const index_t dim = any.dim(), rows = any.group() * dim;
    lease work(pool_, run.workers());
    run(heads.count(), [&](index_t i, index_t worker) {
      const index_t h = heads[i];
      workspace& w = work[worker];
      float* const buffer = w.input.data();
      const float* const q = in.q.floats(std::ptrdiff_t{i} * rows, rows, buffer);
      const float* const k = in.k.floats(std::ptrdiff_t{i} * dim, dim, buffer + rows);
      const float* const v = in.v.floats(std::ptrdiff_t{i} * dim, dim, buffer + rows + dim);
      marks_[at(h)] = !kvmeld::try_step(policy_of(h), kv_.head(h), states_[at(h)], w, q, k, v,
                                        limits_[at(h)], out.data() + std::ptrdiff_t{i} * rows);
    });
    std::string marked;
    for (index_t i = 0; i < heads.count(); ++i) {
      char& mark = marks_[at(heads[i])];
      if (mark != 0) {
        marked += (marked.empty() ? "" : ", ") + std::to_string(heads[i]);
        mark = 0;
      }
    }
    expects(errc::not_finite, marked.empty(), "step: expected finite rows, got NaN or Inf in head ",
            marked, " (as it was; all other heads have made their step)");
  }

  /// One request's heads, as they are saved.
  struct request_heads {
    compressor_base& of;
    index_t request;

    index_t head_of(index_t i) const { return of.kv_.of_request(request, i); }
    index_t count() const { return of.kv_.per_request(); }
    const P& policy(index_t i) const { return of.policy_of(head_of(i)); }
    head_ref head(index_t i) const { return of.kv_.head(head_of(i)); }
    head_state& state(index_t i) const { return of.states_[at(head_of(i))]; }
  };

  /// What heads are held to, with a checksum, then the heads.
  void save_request(std::ostream& out, index_t request) {
    byte_writer limits(out);
    request_heads heads{*this, request};
    for (index_t i = 0; i < heads.count(); ++i) {
      limits.put(limits_[at(heads.head_of(i))].slots);
      limits.put(limits_[at(heads.head_of(i))].trigger);
    }
    limits.finish();
    save_heads(out, heads);
  }
  void load_request(std::istream& in, index_t request) {
    byte_reader from(in);
    request_heads heads{*this, request};
    std::vector<budget> limits;
    for (index_t i = 0; i < heads.count(); ++i) {
      const auto slots = from.get<index_t>(), trigger = from.get<index_t>();
      limits.push_back({slots, trigger});
      expects(errc::corrupt_file, slots > 0 && slots <= heads.head(i).capacity() && trigger >= 0,
              "load: expected a limit of 1 to ", heads.head(i).capacity(), " slots, got ", slots);
    }
    from.finish();
    load_heads(in, heads);
    for (index_t i = 0; i < heads.count(); ++i) {
      limits_[at(heads.head_of(i))] = limits[at(i)];
      held_[at(heads.head_of(i))].release();
    }
    drafts_[at(request)].clear();
  }

  cache_ref kv_;
  std::vector<P> policies_;      // [layers · kv_heads], of a request
  std::vector<budget> budgets_;  // the same
  std::vector<head_state> states_;
  std::vector<budget> limits_;  // what each head is held to while decoding
  std::vector<held_queries> held_;
  std::vector<std::vector<drafted>> drafts_;  // [requests]
  std::vector<char> marks_;                   // of heads, in a step
  workspace_pool pool_;
};

}  // namespace kvmeld::inline v0::detail
