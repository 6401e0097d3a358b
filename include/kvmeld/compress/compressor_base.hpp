// SPDX-License-Identifier: MIT
/// What a compressor holds, and what its calls refuse.
#pragma once

#include <algorithm>  // std::min, std::max
#include <atomic>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "kvmeld/compress/head_policies.hpp"
#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/compress/seals.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/memory/head_selection.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld::inline v0 {

namespace detail {

template <policy P>
class compressor_base : protected head_policies<P> {
 protected:
  using base = head_policies<P>;
  using base::kv_, base::policy_of, base::by_policy, base::slots_of, base::shares, base::is_cut;
  using lease = workspace_pool::lease;

  /// Drafted rows of a head, in floats.
  struct drafted {
    index_t tokens = 0;
    std::vector<float> q, k, v;  // [tokens, ...]
  };

  /// What is kept of one head.
  struct one_head {
    head_state state;
    budget limit;             ///< while decoding
    index_t gone = 0;         ///< its tokens without a slot, as a call left it
    index_t tokens = 0;       ///< those that are measured, or need not be
    kept_slots kept = {};     ///< its first slots; none in `state`
    index_t gathered = 0;     ///< pinned tokens before this position are among these
    index_t compressed = 0;   ///< the position up to which tokens may have been evicted or merged
    bool goes_on = false;     ///< has a part of its prompt ended?
    held_queries held = {};   ///< of a prompt that has begun
    drafted draft = {};       ///< without tokens: none
    bool not_finite = false;  ///< in the step at hand
    bool due = false;         ///< in the step at hand, of heads that evict after it
  };

  template <kv_cache Cache>
  compressor_base(Cache& kv, std::span<const P> policies, std::span<const budget> budgets,
                  const observation_needs& given)
      : base(kv, policies, budgets, given),
        pins_(as_size(kv_.requests())),
        drafts_(as_size(kv_.requests())),
        pool_(kv_.head(0).group(), kv_.head(0).row_dim(), kv_.head(0).capacity()) {
    heads_.reserve(as_size(kv_.heads()));
    for (index_t h = 0; h < kv_.heads(); ++h) {
      heads_.push_back(
          {by_policy(h, [&](const auto& p) { return make_head_state(p, kv_.head(h)); }),
           this->decode_limit(h, slots_of(h))});
      leave(h);
    }
  }

  compressor_base(const compressor_base&) = delete;
  compressor_base& operator=(const compressor_base&) = delete;
  ~compressor_base() {  // the cache, which lives longer, takes rows again
    for (index_t h = 0; h < kv_.heads(); ++h) {
      end_draft(h);
    }
  }

  /// A head as it is left by a call: those of its tokens without a slot, and no slot taken away
  /// since.
  static void leave(one_head& one, const head_ref& head) {
    const index_t gone = head.next_position() - head.length();
    one.compressed = gone != one.gone ? head.next_position() : one.compressed;
    one.gone = gone;
    if (index_t* const kept = head.metadata().kept; kept != nullptr) {
      *kept = head.length();
    }
  }
  void leave(index_t h) { leave(of(h), kv_.head(h)); }
  /// All tokens that these heads have by now are measured, or need not be.
  void count_tokens(const head_selection& heads) {
    for (index_t i = 0; i < heads.count(); ++i) {
      of(heads[i]).tokens = kv_.head(heads[i]).next_position();
    }
  }
  /// The same at the end of a scope, whatever a policy throws in it.
  struct leaving {
    one_head& one;
    const head_ref& head;
    ~leaving() { leave(one, head); }
  };
  /// Refused: a head whose slots were taken away since, whatever was appended then: its state is
  /// not of these slots. Where it ends a prompt, the latest may have been taken away again, as
  /// those of a second reading (kvzip).
  void expect_left(const char* call, index_t h, bool ends_prompt = false) const {
    const head_ref head = kv_.head(h);
    const index_t gone = head.next_position() - head.length(), hidden = of(h).kept.count(),
                  known = hidden + of(h).state.length(),
                  least = ends_prompt ? std::max(hidden, std::min(known, head.length())) : known;
    const index_t* const kept = head.metadata().kept;
    expects(gone == of(h).gone && head.length() >= least && (kept == nullptr || *kept >= least),
            call, ": expected head ", h,
            " as it was left (clear, and draft with accept, set it back), got ", head.length(),
            " slots of ", head.next_position(), " tokens, and a state of ", known, " of ",
            known + of(h).gone);
  }

  // What is open of a request, which every call asks: a prompt of its heads, or a draft.

  bool has_draft(index_t request) const { return drafts_[as_size(request)] > 0; }
  /// Refused: a draft of the request that was not accepted.
  void expect_no_draft(const char* call, index_t request) const {
    expects(!has_draft(request), call, ": expected accept first, got a draft");
  }
  /// The same of the heads chosen.
  void expect_no_draft(const char* call, const head_selection& heads) const {
    for (index_t i = 0; i < heads.count(); ++i) {
      expect_no_draft(call, kv_.request_of(heads[i]));
    }
  }
  /// Refused: a prompt of the head that has not ended.
  void expect_no_prompt(const char* call, index_t h) const {
    expects(!of(h).held.begun(), call,
            ": expected end_prompt first, got a prompt that has not ended");
  }
  void expect_nothing_open(const char* call, index_t h) const {
    expect_no_prompt(call, h);
    expect_no_draft(call, kv_.request_of(h));
  }
  void begin_draft(index_t h, drafted rows) {
    of(h).draft = std::move(rows);
    ++drafts_[as_size(kv_.request_of(h))];
    kv_.count_drafts(h, 1);
  }
  void end_draft(index_t h) {
    if (of(h).draft.tokens > 0) {
      of(h).draft = {};
      --drafts_[as_size(kv_.request_of(h))];
      kv_.count_drafts(h, -1);
    }
  }

  /// Refused: other positions than the heads', or not one for each token and request; where none
  /// are given, what `expect_order` refuses.
  void expect_positions(const char* call, const head_selection& heads, const step_input& in,
                        index_t tokens, bool taken) const {
    const index_t count = heads.count(),
                  requests = static_cast<index_t>(in.positions.size()) / tokens;
    expects(in.positions.empty() ||
                (in.positions.data() != nullptr && requests > 0 && count % requests == 0 &&
                 in.positions.size() == as_size(requests, tokens)),
            call, ": expected positions [", tokens, ", requests] of ", count, " heads, got ",
            in.positions.size());
    for (index_t i = 0; i < count; ++i) {
      const index_t h = heads[i], next = kv_.head(h).next_position();
      if (in.positions.empty()) {
        expect_order(call, h, taken);
      }
      for (index_t t = 0; t < tokens && !in.positions.empty(); ++t) {
        const index_t got = in.positions[as_size(t * requests + i / (count / requests))];
        expects(got == next + t, call, ": expected position ", next + t, " of head ", h, ", got ",
                got);
      }
    }
  }
  /// Refused: a token of head `h` in another order than that of the layers, or one that its layer
  /// has already: it would be at another position there. `taken`: does the layer before have it? A
  /// layer without tokens is asked by its own first one.
  void expect_order(const char* call, index_t h, bool taken) const {
    const index_t before = kv_.in_layer_before(h), own = kv_.head(h).next_position(),
                  other = kv_.head(before).next_position(),
                  wanted = own + (taken && !kv_.in_first_layer(h) ? 1 : 0);
    expects(before == h || other == 0 || other == wanted, call,
            ": expected each token once in every layer, in their order, got head ", h,
            " at position ", own, " and head ", before, " of the layer ",
            kv_.in_first_layer(h) ? "that is last" : "before", " at ", other);
  }
  /// Refused: pages of other tables too, where `tokens` more and the budget change rows.
  void expect_own_pages(const char* call, index_t h, const budget& b, index_t tokens) const {
    if (kv_.in_pages()) {
      const index_t length = kv_.head(h).length(), last = length + tokens,
                    kept = of(h).kept.count();
      const bool plans = b.reached(last - kept) &&
                         by_policy(h, [](const auto& p) { return declared(p).evicts(); });
      kv_.expect_own_pages(call, h, plans ? kept : length, last);
    }
  }
  /// After a call that may have freed pages of these heads.
  void count_pages(const head_selection& heads) const {
    for (index_t i = 0; i < heads.count(); ++i) {
      kv_.count_pages(heads[i]);
    }
  }
  /// Gives back what head `h` holds beyond its slots in use, and beyond `slots` after the seal.
  void give_back(index_t h, index_t slots = 0) {
    slots = std::min(slots, kv_.head(h).capacity() - of(h).kept.count());
    kv_.give_back(h, of(h).kept.count() + slots);
    of(h).state.give_back(slots);
  }
  void expect_head(const char* call, index_t h) const {
    expects(h >= 0 && h < kv_.heads(), call, ": expected a head from 0 to ", kv_.heads() - 1,
            ", got ", h);
  }

  /// Does head `h` hold every token of its request, and its policy see all of them?
  bool is_whole(index_t h) const {
    return of(h).kept.count() == 0 && kv_.head(h).length() == kv_.head(h).next_position();
  }
  /// What the policy of head `h` sees of it.
  seen_head seen(index_t h) const { return {kv_.head(h), of(h).kept}; }
  one_head& of(index_t head) { return heads_[as_size(head)]; }
  const one_head& of(index_t head) const { return heads_[as_size(head)]; }

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
      expect_nothing_open(call, h);
      expect_left(call, h);
    }
  }

  /// Refused where heads of a layer keep the same tokens: others than those of whole layers in
  /// their order, and other tokens than those of the layer's first head.
  void expect_alike(const char* call, const head_selection& heads) const {
    const index_t n = this->alike_ ? kv_.head(0).spec().kv_heads : 0;
    for (index_t i = 0; i < heads.count() && n > 0; ++i) {
      const index_t h = heads[i], first = h - h % n;
      const head_ref own = kv_.head(h), like = kv_.head(first);
      bool same = heads.count() % n == 0 && heads[i - i % n] + i % n == h && h % n == i % n &&
                  own.length() == like.length() && own.next_position() == like.next_position();
      for (index_t s = 0; same && s < own.length(); ++s) {
        same = own.position(s) == like.position(s);
      }
      expects(same || (is_cut(h) && is_cut(heads[i - i % n])), call,
              ": expected all heads of each layer, with the same tokens, ", "got head ", h,
              " without head ", first, "'s");
    }
  }
  /// Does the head await the end of a prompt, or is it at its trigger?
  bool is_due(index_t h) const {
    return of(h).held.begun() || of(h).limit.reached(kv_.head(h).length() - of(h).kept.count());
  }
  /// Heads of a layer that keep the same tokens get the mean of their scores; once more, the same.
  void average(const head_selection& heads, bool only_due) {
    const index_t n = this->alike_ ? kv_.head(0).spec().kv_heads : 0;
    for (index_t i = 0; i < heads.count() && n > 0; i += n) {
      if (this->alike(heads[i]) && (!only_due || is_due(heads[i]))) {
        average_scores(n, [&](index_t k) -> head_state& {
          of(heads[i + k]).state.extend(seen(heads[i + k]).head().length());
          leave(heads[i + k]);
          return of(heads[i + k]).state;
        });
      }
    }
  }

  /// Tokens `first` to `end` − 1 of a request, which are pinned.
  struct token_span {
    index_t first, end;
  };
  /// Is it a head whose pinned tokens need slots that its policy does not see?
  bool pins(index_t h) const {
    return !is_cut(h) && by_policy(h, [](const auto& p) { return declared(p).evicts(); });
  }
  bool is_pinned(index_t request, index_t position) const {
    return std::ranges::any_of(pins_[as_size(request)], [&](const token_span& t) {
      return position >= t.first && position < t.end;
    });
  }
  /// Has head `h` pinned tokens that are still to be appended or gathered?
  bool awaits_pins(index_t h) const {
    const auto& spans = pins_[as_size(kv_.request_of(h))];
    return !spans.empty() && spans.back().end > of(h).gathered && pins(h);
  }
  /// Refused: pages of other tables too, among which pinned tokens would be moved.
  void expect_gathered(const char* call, index_t h) const {
    const head_ref head = kv_.head(h);
    for (index_t s = of(h).kept.count(); s < head.length() && kv_.in_pages(); ++s) {
      if (is_pinned(kv_.request_of(h), head.position(s))) {
        return kv_.expect_own_pages(call, h, of(h).kept.count(), head.length());
      }
    }
  }
  /// Moves the pinned tokens appended so far to where no policy sees them.
  void gather(const char* call, const head_selection& heads) {
    for (index_t i = 0; i < heads.count(); ++i) {
      const index_t h = heads[i], request = kv_.request_of(h);
      one_head& one = of(h);
      if (awaits_pins(h) && one.gathered < kv_.head(h).next_position()) {
        expect_left(call, h, one.held.begun());
        expect_gathered(call, h);
        one.gathered = kv_.head(h).next_position();
        const index_t pinned =
            gather_pinned(kv_.head(h), one.state, one.kept.count(),
                          [&](index_t position) { return is_pinned(request, position); });
        one.kept.pinned += pinned;
        one.limit = this->limit_without(h, one.limit, pinned);  // until a prompt ends
        leave(h);
      }
    }
  }

  /// Slots that a request's heads are brought to after its prompt, without the kept ones. Refused:
  /// as `end_prompt` does.
  std::vector<index_t> prompt_slots(const std::vector<index_t>& heads, const process_group& group) {
    expects(errc::unsupported, !this->alike_ || !group.gather,
            "end_prompt: expected one process where heads keep the same tokens, got several");
    std::vector<index_t> slots, sharing, most;
    std::deque<seen_head> behind_seals;
    for (const index_t h : heads) {
      slots.push_back(slots_of(h) - of(h).kept.pinned);
      if (shares(h)) {
        expect_left("end_prompt", h, of(h).held.begun());
        sharing.push_back(h), behind_seals.emplace_back(kv_.head(h), of(h).kept);
        most.push_back(
            this->most_of(h, of(h).kept, of(h).goes_on ? of(h).held.tokens() : index_t{0}));
      }
    }
    expect_alike("end_prompt", heads);
    for (const index_t h : heads) {
      if (this->alike(h)) {
        expect_prompt("end_prompt", h, {slots_of(h) - of(h).kept.pinned});
      }
    }
    average(heads, false);
    std::vector<std::vector<float>> weights;
    const auto head_of = [&](std::size_t i) -> const head_ref& { return behind_seals[i].head(); };
    const auto state_of = [&](std::size_t i) -> head_state& { return of(sharing[i]).state; };
    if (!sharing.empty()) {
      for (std::size_t i = 0; i < sharing.size(); ++i) {
        state_of(i).extend(head_of(i).length());  // tokens without queries have no score
        leave(sharing[i]);
      }
      const index_t first = sharing.front();
      const auto divided = divide_by_scores(policy_of(first), head_of, state_of, most,
                                            {.slots = slots_of(first) - of(first).kept.pinned,
                                             .kv_heads = kv_.head(0).spec().kv_heads,
                                             .by_layer = this->shares_by_layer(first),
                                             .group = group},
                                            weights);
      for (std::size_t i = 0, next = 0; i < heads.size(); ++i) {
        slots[i] = shares(heads[i]) ? divided[next++] : slots[i];
      }
    }
    for (std::size_t i = 0; i < heads.size(); ++i) {
      expect_prompt("end_prompt", heads[i], {slots[i]});
    }
    for (std::size_t i = 0; i < sharing.size(); ++i) {
      keep_weights(policy_of(sharing[i]), weights[i], state_of(i));
    }
    return slots;
  }

  /// Before head `h` is brought to budget `b`.
  void expect_prompt(const char* call, index_t h, const budget& b) const {
    expect_left(call, h, of(h).held.begun());
    expect_own_pages(call, h, b, 0);
    by_policy(h, [&](const auto& p) {
      expects(kv_.head(h).length() - of(h).kept.count() <= b.slots || !declared(p).evicts() ||
                  !declared(p).prompt_use().needs_queries() || of(h).held.begun() ||
                  of(h).state.observed() > 0,
              p.name(), ": expected the prompt's queries, got none");
    });
  }

  /// Before head `h` is compressed apart from its request's other layers.
  void expect_compress(index_t h) const {
    expect_no_draft("compress", kv_.request_of(h));
    const bool begun = of(h).held.begun();
    expects(!begun || !shares(h),
            "compress: expected end_prompt first (budgets are shared by all layers), got a prompt "
            "that has not ended");
    expect_prompt("compress", h, begun ? budget{slots_of(h) - of(h).kept.pinned} : of(h).limit);
  }

  /// Refused: heads that are not there or are given twice, rows but of `[tokens, heads, ...]`,
  /// null.
  void expect_rows(const char* call, const head_selection& heads, const step_input& in,
                   std::span<float> out, index_t tokens) const;
  /// A prompt's queries: of the heads chosen, no more than tokens, finite where a head checks.
  void expect_queries(const head_selection& heads, const queries& q) const;
  /// Refuses a step that some heads have not made, and names them.
  void expect_finite_steps(const char* call, const head_selection& heads) const {
    std::string marked;
    for (index_t i = 0; i < heads.count(); ++i) {
      if (of(heads[i]).not_finite) {
        marked += (marked.empty() ? "" : ", ") + std::to_string(heads[i]);
      }
    }
    expects(errc::not_finite, marked.empty(), call,
            ": expected finite rows, got NaN or Inf in head ", std::string_view(marked),
            " (as it was; all other heads have made their step)");
  }

  std::vector<one_head> heads_;
  std::vector<std::vector<token_span>> pins_;  // [requests], ascending, apart
  // [requests] heads with a draft; threads may draft for those of one request at the same time.
  std::vector<std::atomic<index_t>> drafts_;
  workspace_pool pool_;
};

// Not in the class: what is inline is compiled by every file, `extern template` or not.

template <policy P>
void compressor_base<P>::expect_rows(const char* call, const head_selection& heads,
                                     const step_input& in, std::span<float> out,
                                     index_t tokens) const {
  heads.check(call, kv_.heads());
  const head_ref any = kv_.head(0);
  const index_t n = heads.count(), group = any.group(), dim = any.dim(), of_v = any.value_dim();
  expect_size(call, "q", in.q, {tokens, n, group, dim});
  expect_size(call, "k", in.k, {tokens, n, 1, dim});
  expect_no_values(call, any.one_memory(), of_v, in.v);
  expect_size(call, "v", in.v, {tokens, n, 1, any.own_value_dim()});
  expect_size(call, "out", out, {tokens, n, group, of_v});
  const any_span written(out);
  expects(!written.overlaps(in.q) && !written.overlaps(in.k) && !written.overlaps(in.v), call,
          ": expected out in memory of its own, got that of q, k or v");
}

template <policy P>
void compressor_base<P>::expect_queries(const head_selection& heads, const queries& q) const {
  heads.check("prompt", kv_.heads());
  expect_no_draft("prompt", heads);
  expects(heads.count() == q.kv_heads(), "prompt: expected queries of ", heads.count(),
          " KV heads, got ", q.kv_heads());
  for (index_t i = 0; i < heads.count(); ++i) {
    const head_ref head = kv_.head(heads[i]);
    expects(kv_.together(heads[i], heads[0]),
            "prompt: expected heads of one layer and request, got heads ", heads[0], " and ",
            heads[i]);
    expect_left("prompt", heads[i]);
    expects(head.group() == q.group() && head.dim() == q.dim(), "prompt: expected queries of [",
            head.group(), ", ", head.dim(), "] per KV head, got [", q.group(), ", ", q.dim(), "]");
    const index_t tokens = seen(heads[i]).head().tokens();
    expects(q.tokens() <= tokens, "prompt: expected at most ", tokens,
            " queries (the tokens appended", of(heads[i]).kept.sealed > 0 ? " after the seal" : "",
            "), got ", q.tokens());
    if (head.check_finite()) {
      expect_finite("prompt: expected finite queries", q.rows());
    }
    if (is_whole(heads[i])) {
      q.of_head(i, [&](const auto& own) { expect_log_sum_exp("prompt", head, own); });
    }
  }
}

}  // namespace detail
}  // namespace kvmeld::inline v0
