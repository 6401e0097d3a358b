// SPDX-License-Identifier: MIT
/// The heads of a compressor: what is held of each, what is open of its request, and what a call
/// does with one.
#pragma once

#include <algorithm>  // std::min, std::max
#include <atomic>
#include <limits>  // std::numeric_limits
#include <string>
#include <string_view>
#include <utility>  // std::exchange
#include <vector>

#include "kvmeld/compress/head_policies.hpp"
#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/kept_slots.hpp"
#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/executor.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0::detail {

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
  index_t measured = 0;     ///< slots that are so by the last call that did not throw
  kept_slots kept = {};     ///< its first slots; none in `state`
  index_t gathered = 0;     ///< pinned tokens before this position are among these
  index_t compressed = 0;   ///< the position up to which tokens may have been evicted or merged
  bool goes_on = false;     ///< has a part of its prompt ended?
  held_queries held = {};   ///< of a prompt that has begun
  drafted draft = {};       ///< without tokens: none
  bool not_finite = false;  ///< in the step at hand
  bool due = false;         ///< in the step at hand, of heads that evict after it
};

/// What may be open of a request while a call is made.
enum class open {
  nothing,
  by_hand,  ///< the same, and a head's slots may have been taken away
  prompt,
  last_of_prompt,  ///< the latest rows may have been taken away, as those of a second reading
  draft            ///< of other heads than those chosen
};

/// The heads of a compressor, with their policies.
template <policy P>
class open_heads {
 public:
  open_heads(const cache_ref& cache, std::span<const P> of_heads, std::span<const budget> budgets,
             const observation_needs& given);
  open_heads(const open_heads&) = delete;
  open_heads& operator=(const open_heads&) = delete;
  ~open_heads() {  // the cache, which lives longer, takes rows again
    for (index_t h = 0; h < kv.heads(); ++h) {
      end_draft(h);
    }
  }

  one_head& of(index_t h) { return heads[as_size(h)]; }
  const one_head& of(index_t h) const { return heads[as_size(h)]; }
  pinned_tokens& pins_of(index_t h) { return pins[as_size(kv.request_of(h))]; }
  const pinned_tokens& pins_of(index_t h) const { return pins[as_size(kv.request_of(h))]; }
  /// What the policy of head `h` sees of it.
  seen_head seen(index_t h) const { return {kv.head(h), of(h).kept}; }
  index_t seen_length(index_t h) const { return kv.head(h).length() - of(h).kept.count(); }
  /// Slots of head `h` that its state has numbers of, or had when it came to rest.
  index_t known_slots(index_t h) const {
    return of(h).state.rests() ? std::min(of(h).measured, seen_length(h)) : of(h).state.length();
  }
  /// Slots of head `h` that are not measured yet. Where a policy throws, all are measured anew.
  index_t new_slots(index_t h) const {
    return seen_length(h) - std::min(known_slots(h), of(h).measured);
  }
  /// Its tokens since the last call but `prompt`.
  index_t new_tokens(index_t h) const { return kv.head(h).next_position() - of(h).tokens; }
  /// Does head `h` hold every token of its request, and its policy see all of them?
  bool is_whole(index_t h) const {
    return of(h).kept.count() == 0 && kv.head(h).length() == kv.head(h).next_position();
  }
  /// Does the head await the end of a prompt, or is it at its trigger?
  bool is_due(index_t h) const { return of(h).held.begun() || of(h).limit.reached(seen_length(h)); }
  /// Slots that a prompt of head `h` is brought to, unless it shares them: without the pinned ones.
  index_t slots_of(index_t h) const { return policies.slots_of(h) - of(h).kept.pinned; }

  /// The heads of a request. Refused: a request that is not there.
  std::vector<index_t> of_request(const char* call, index_t request) const;
  void expect_head(const char* call, index_t h) const {
    expects(h >= 0 && h < kv.heads(), call, ": expected a head from 0 to ", kv.heads() - 1,
            ", got ", h);
  }

  // --------------------------------------------------------------------------- what is open

  bool has_draft(index_t h) const { return drafts[as_size(kv.request_of(h))] > 0; }
  /// Refused: a prompt of these heads, or a draft of their requests, unless it `may_be`; slots that
  /// were taken away since the last call, whatever was appended then: states are not of these.
  void admit(const char* call, const head_selection& chosen, open may_be) const {
    for (index_t i = 0; i < chosen.count(); ++i) {
      admit(call, chosen[i], may_be);
    }
  }
  void admit(const char* call, index_t h, open may_be) const;
  /// The heads of a request of which nothing is open.
  std::vector<index_t> closed(const char* call, index_t request) const {
    std::vector<index_t> chosen = of_request(call, request);
    admit(call, chosen, open::nothing);
    return chosen;
  }
  void begin_draft(index_t h, drafted&& rows) {
    of(h).draft = std::move(rows);
    ++drafts[as_size(kv.request_of(h))];
    kv.count_drafts(h, 1);
  }
  drafted end_draft(index_t h) {
    if (of(h).draft.tokens > 0) {
      --drafts[as_size(kv.request_of(h))];
      kv.count_drafts(h, -1);
    }
    return std::exchange(of(h).draft, {});
  }

  /// A head as it is left by a call: those of its tokens without a slot, and no slot taken away
  /// since.
  void leave(index_t h) {
    one_head& one = of(h);
    const head_ref head = kv.head(h);
    const index_t gone = head.next_position() - head.length();
    one.compressed = gone != one.gone ? head.next_position() : one.compressed;
    one.gone = gone;
    if (index_t* const kept = head.metadata().kept; kept != nullptr) {
      *kept = head.length();
    }
  }
  /// That at the end of a scope, whatever a policy throws in it.
  struct leaving {
    open_heads& all;
    index_t h;
    ~leaving() { all.leave(h); }
  };
  /// The same, with all of its tokens measured by now.
  void leave_measured(index_t h) {
    leave(h);
    count_measured(h);
  }
  void count_measured(index_t h) {
    of(h).tokens = kv.head(h).next_position();
    of(h).measured = of(h).state.rests() ? seen_length(h) : of(h).state.length();
  }
  /// Has a head of so many slots more steps to its plan than the plan reads?
  static bool is_far(index_t slots, index_t steps, const budget& limit) {
    return std::int64_t{slots} + steps < limit.trigger_length();
  }
  /// The state of head `h` rests where its plan is so far that it need not observe the next step,
  /// or one whose `appended` token is there already.
  void wake_or_rest(index_t h, index_t appended = 0) {
    one_head& one = of(h);
    policies.with(h, [&](const auto& p) {
      const decode_use use = declared(p).decode_use();
      if (is_far(seen_length(h) - appended, use.steps, one.limit)) {
        one.state.rest(use.columns, use.memory);
      } else if (one.state.rests()) {
        one.state.extend(known_slots(h));
      }
    });
  }
  /// Holds a head to `limit` from now on, with `kept` slots and no prompt begun.
  void hold_to(index_t h, const budget& limit, const kept_slots& kept, bool goes_on = false) {
    one_head& one = of(h);
    one.limit = limit, one.kept = kept, one.goes_on = goes_on;
    one.held.release();
    (void)end_draft(h);
    leave_measured(h);
    wake_or_rest(h);
    give_back(h);
  }
  /// Gives back what head `h` holds beyond its slots in use, and beyond `slots` after the seal.
  void give_back(index_t h, index_t slots = 0) {
    slots = std::min(slots, kv.head(h).capacity() - of(h).kept.count());
    kv.give_back(h, of(h).kept.count() + slots);
    of(h).state.give_back(slots);
  }

  // --------------------------------------------------------------------------- calls of a head

  /// Takes what the policy wants of a chunk's queries, those of its `i`th head.
  void measure(index_t h, index_t i, const queries& q);
  /// One token of one head, as `try_step`.
  bool step(index_t h, workspace& work, const float* q, const float* k, const float* v, float* out);
  /// After a step: evicts where heads of a layer keep the same tokens, once all have made it, and
  /// where a pinned token was awaited.
  template <executor E>
  void evict_late(const head_selection& chosen, workspace_pool::lease& work, const E& run) {
    bool any = false;
    for (index_t i = 0; i < chosen.count(); ++i) {
      any = any || of(chosen[i]).due;
    }
    if (any) {
      gather("step", chosen);
    }
    if (policies.alike() ? due_alike(chosen) : any) {
      run(chosen.count(), [&](index_t i, index_t worker) {
        if (of(chosen[i]).due) {
          to_limit(chosen[i], work[worker]);
        }
      });
    }
  }
  /// Ends a head's prompt, or brings it to its budget where it is at its trigger.
  void to_limit(index_t h, workspace& work);
  /// Plans a head's prompt on what was kept of its queries, and holds it to `slots` from now on.
  /// A policy that throws once its plan was carried out has ended the prompt.
  void finish(index_t h, index_t slots, workspace& work);
  /// Refused: heads that have not been given equally many tokens, as where a layer lacks the
  /// prompt.
  void expect_equal_tokens(const char* call, const head_selection& chosen) const;
  /// Before head `h` is brought to budget `b`.
  void expect_prompt(const char* call, index_t h, const budget& b) const;
  /// Refuses a step that some heads have not made, and names them.
  void expect_finite_steps(const char* call, const head_selection& chosen) const;

  // --------------------------------------------------------------------------- rows and pages

  /// Refused: heads that are not there or are given twice, rows but of `[tokens, heads, ...]`,
  /// null.
  void expect_rows(const char* call, const head_selection& chosen, const step_input& in,
                   std::span<float> out, index_t tokens) const;
  /// Refused: other positions than the heads', or not one for each token and request; where none
  /// are given, a token in another order than that of the layers, or one that its layer has
  /// already: it would be at another position there. `taken`: does the layer before have it?
  void expect_positions(const char* call, const head_selection& chosen, const step_input& in,
                        index_t tokens, bool taken) const;
  /// Refused: pages of other tables too, where `tokens` more and the budget change rows.
  void expect_own_pages(const char* call, index_t h, const budget& b, index_t tokens) const {
    if (kv.in_pages()) {
      const index_t length = kv.head(h).length();
      const bool plans = policies.evicts(h) &&
                         (b.reached(seen_length(h) + tokens) || new_scores(h).within(tokens));
      kv.expect_own_pages(call, h, plans ? of(h).kept.count() : length, length + tokens);
    }
  }
  /// After a call that may have freed pages of these heads.
  void count_pages(const head_selection& chosen) const {
    for (index_t i = 0; i < chosen.count(); ++i) {
      kv.count_pages(chosen[i]);
    }
  }
  /// Carries out `call`. Where it refuses, pages are counted anew: checks count them as in use.
  void or_recount(const head_selection& chosen, const auto& call) const {
    or_undo(call, [&] { count_pages(chosen); });
  }

  // --------------------------------------------------------------------------- shared slots

  /// When the slots that head `h` shares may be divided again.
  kvmeld::new_scores new_scores(index_t h) const {
    return policies.shares(h) ? declared(policies.policy_of(h)).new_scores(kv.head(h), of(h).state)
                              : kvmeld::new_scores();
  }
  /// Divides again what the heads of a request share, of the requests whose last layer is among
  /// these heads, if all heads have new scores by now. Together they have as many slots as before.
  /// Not where a part of the layer is: other threads may be at work on the others.
  void divide_again(const head_selection& chosen) {
    if (!policies.any_shares()) {
      return;
    }
    const index_t of_layer = kv.head(0).spec().kv_heads;
    for (index_t i = 0; i + of_layer <= chosen.count(); ++i) {
      const index_t h = chosen[i];
      if (kv.in_request(h) % of_layer == 0 && chosen[i + of_layer - 1] == h + of_layer - 1 &&
          policies.in_last_shared(h) && new_scores(h).are_there()) {
        divide_again(kv.request_of(h));
      }
    }
  }
  void divide_again(index_t request);

  // --------------------------------------------------------------------------- the same tokens

  /// Refused where heads of a layer keep the same tokens: others than those of whole layers in
  /// their order, and other tokens than those of the layer's first head.
  void expect_alike(const char* call, const head_selection& chosen) const;
  /// Heads of a layer that keep the same tokens get the mean of their scores; once more, the same.
  void average(const head_selection& chosen, bool only_due);
  /// Marks the heads of the layers that are due after a step, and gives them their mean scores; is
  /// there any? One that has not made the step leaves its layer as it is.
  bool due_alike(const head_selection& chosen);

  // --------------------------------------------------------------------------- pinned tokens

  /// Has head `h` pinned tokens that are still to be appended or gathered?
  bool awaits_pins(index_t h) const {
    return pins_of(h).end() > of(h).gathered && !policies.is_cut(h) && policies.evicts(h);
  }
  /// Moves the pinned tokens appended so far to where no policy sees them.
  void gather(const char* call, const head_selection& chosen);

  cache_ref kv;
  head_policies<P> policies;
  std::vector<one_head> heads;
  std::vector<pinned_tokens> pins;  // [requests]
  // [requests] heads with a draft; threads may draft for those of one request at the same time.
  std::vector<std::atomic<index_t>> drafts;
};

// Not in the class: what is inline is compiled by every file, `extern template` or not.

template <policy P>
open_heads<P>::open_heads(const cache_ref& cache, std::span<const P> of_heads,
                          std::span<const budget> budgets, const observation_needs& given)
    : kv(cache),
      policies(cache, of_heads, budgets, given),
      pins(as_size(cache.requests())),
      drafts(as_size(cache.requests())) {
  heads.reserve(as_size(kv.heads()));
  for (index_t h = 0; h < kv.heads(); ++h) {
    heads.push_back(
        {policies.with(h, [&](const auto& p) { return make_head_state(p, kv.head(h)); }),
         policies.decode_limit(h, policies.slots_of(h))});
    leave(h);
    wake_or_rest(h);
  }
}

template <policy P>
std::vector<index_t> open_heads<P>::of_request(const char* call, index_t request) const {
  expects(request >= 0 && request < kv.requests(), call, ": expected a request of 0 to ",
          kv.requests() - 1, ", got ", request);
  std::vector<index_t> chosen(as_size(kv.per_request()));
  for (index_t i = 0; index_t & h : chosen) {
    h = kv.of_request(request, i++);
  }
  return chosen;
}

template <policy P>
void open_heads<P>::admit(const char* call, index_t h, open may_be) const {
  const one_head& one = of(h);
  expects(!one.held.begun() || may_be == open::prompt || may_be == open::last_of_prompt, call,
          ": expected end_prompt first, got a prompt that has not ended");
  expects(may_be == open::draft || !has_draft(h), call, ": expected accept first, got a draft");
  const head_ref head = kv.head(h);
  const bool last = may_be == open::last_of_prompt && one.held.begun();
  const index_t gone = head.next_position() - head.length(), hidden = one.kept.count(),
                known = hidden + known_slots(h),
                least = last ? std::max(hidden, std::min(known, head.length())) : known;
  const index_t* const kept = head.metadata().kept;
  expects(may_be == open::by_hand ||
              (gone == one.gone && head.length() >= least && (kept == nullptr || *kept >= least)),
          call, ": expected head ", h,
          " as it was left (clear, and draft with accept, set it back), got ", head.length(),
          " slots of ", head.next_position(), " tokens, and a state of ", known, " of ",
          known + one.gone);
}

template <policy P>
void open_heads<P>::measure(index_t h, index_t i, const queries& q) {
  const seen_head behind_seal = seen(h);
  one_head& one = of(h);
  policies.with(h, [&](const auto& p) {
    q.of_head(i, [&](auto own) {
      if (!is_whole(h)) {
        own.log_sum_exp = nullptr;  // the engine's attention was over other slots
      }
      observe_prompt(p, behind_seal.head(), one.state, one.held, own);
    });
  });
  leave(h);
}

template <policy P>
bool open_heads<P>::step(index_t h, workspace& work, const float* q, const float* k, const float* v,
                         float* out) {
  const head_ref head = kv.head(h);
  one_head& one = of(h);
  const leaving keeps{*this, h};
  budget limit = one.limit.reached(seen_length(h) + 1)
                     ? policies.in_turn(h, one.limit, head.next_position() + 1)
                     : one.limit;
  one.due = awaits_pins(h);
  if (policies.alike(h) || one.due) {
    limit.trigger = std::numeric_limits<index_t>::max();  // `evict_late` follows
  }
  wake_or_rest(h);
  return policies.with(h, [&](const auto& p) {
    return one.kept.count() == 0
               ? try_step(p, head, one.state, work, q, k, v, limit, out)
               : try_kept_step(p, head, one.kept, one.state, work, q, k, v, limit, out);
  });
}

template <policy P>
void open_heads<P>::to_limit(index_t h, workspace& work) {
  one_head& one = of(h);
  if (one.held.begun()) {
    finish(h, slots_of(h), work);
  } else if (one.limit.reached(seen_length(h))) {
    const leaving keeps{*this, h};
    const seen_head behind_seal = seen(h);
    policies.with(h, [&](const auto& p) {
      compress(p, behind_seal.head(), one.state, work,
               policies.in_turn(h, one.limit, behind_seal.head().next_position()));
    });
  }
}

template <policy P>
void open_heads<P>::finish(index_t h, index_t slots, workspace& work) {
  one_head& one = of(h);
  const auto by_seen = [&](const auto& use) {
    const seen_head behind_seal = seen(h);
    if (const head_ref& head = behind_seal.head(); head.length() > 0) {
      policies.with(h, [&](const auto& p) { use(p, head); });
    }
  };
  by_seen([&](const auto& p, const head_ref& head) {
    const auto queries = planned_queries(p, head, one.state, one.held);
    bring_to(p, head, one.state, work, budget{slots}, queries);
  });
  one.limit = policies.decode_limit(h, slots, one.kept);
  one.goes_on = one.goes_on || one.held.begun();
  one.held.release();
  leave_measured(h);
  by_seen([&](const auto& p, const head_ref& head) {
    declared(p).after_compress(head, one.state, slots);
  });
  wake_or_rest(h);
  give_back(h, one.limit.trigger_length());
}

template <policy P>
void open_heads<P>::divide_again(index_t request) {
  std::vector<index_t> sharing, most;
  std::int64_t all = 0, room = 0;
  index_t longest = 0;
  for (index_t i = 0; i < kv.per_request(); ++i) {
    const index_t h = kv.of_request(request, i);
    if (!policies.shares(h)) {
      continue;
    }
    if (!new_scores(h).are_there() || (!sharing.empty() && of(h).tokens != of(sharing[0]).tokens)) {
      return;
    }
    sharing.push_back(h);
    most.push_back(policies.most_of(h, of(h).kept, 0));
    room += most.back(), all += policies.shared_part(h, of(h).limit);
    longest = std::max(longest, seen_length(h));
  }
  const auto count = static_cast<std::int64_t>(sharing.size());
  const auto slots = static_cast<index_t>(all / count), rest = static_cast<index_t>(all % count);
  const P& p = policies.policy_of(sharing[0]);
  const auto shared = shared_slots::of(p);
  std::vector<std::vector<float>> scores(sharing.size());
  std::vector<float> of_slots(as_size(longest));
  for (std::size_t i = 0; i < sharing.size(); ++i) {
    const seen_head behind_seal = seen(sharing[i]);
    const auto own = std::span(of_slots).first(as_size(behind_seal.head().length()));
    declared(p).shared_scores(behind_seal.head(), of(sharing[i]).state, own);
    add_shared_scores(behind_seal.head(), own, shared, scores[i]);
  }
  const auto most_scores = static_cast<index_t>(
      std::ranges::max(scores, {}, [](const auto& s) { return s.size(); }).size());
  if (most_scores <= slots - shared.own || all > room) {
    return;  // every head can still hold all that it has, or was given more than its cap by hand
  }
  // A head may get more slots than it has at present: tokens are still to be appended.
  longest = slots + shared.own + most_scores + 1;
  const index_t of_layer = kv.head(sharing[0]).spec().kv_heads;
  const auto divided =
      policies.shares_by_layer(sharing[0]) && of_layer > 1
          ? divide_by_layer(std::move(scores), of_layer, shared, slots, longest, most, rest)
          : divide_slots(scores, shared, slots, longest, most, rest);
  for (std::size_t i = 0; i < sharing.size(); ++i) {
    const index_t h = sharing[i];
    of(h).limit = policies.decode_limit(h, divided[i], of(h).kept);
    give_back(h, of(h).limit.trigger_length());
  }
}

template <policy P>
void open_heads<P>::expect_equal_tokens(const char* call, const head_selection& chosen) const {
  const index_t tokens = kv.head(chosen[0]).next_position();
  for (index_t i = 1; i < chosen.count(); ++i) {
    const index_t got = kv.head(chosen[i]).next_position();
    expects(got == tokens, call, ": expected as many tokens in every head, got ", tokens,
            " in head ", chosen[0], " and ", got, " in head ", chosen[i]);
  }
}

template <policy P>
void open_heads<P>::expect_prompt(const char* call, index_t h, const budget& b) const {
  admit(call, h, open::last_of_prompt);
  expect_own_pages(call, h, b, 0);
  policies.with(h, [&](const auto& p) {
    expects(!b.reached(seen_length(h)) || !declared(p).evicts() ||
                !declared(p).prompt_use().needs_queries() || of(h).held.begun() ||
                (of(h).state.observed() > 0 && !of(h).state.rests() &&
                 (new_tokens(h) == 0 || !declared(p).uses_attention())),
            p.name(), ": expected the prompt's queries, got none");
  });
}

template <policy P>
void open_heads<P>::expect_finite_steps(const char* call, const head_selection& chosen) const {
  std::string marked;
  for (index_t i = 0; i < chosen.count(); ++i) {
    if (of(chosen[i]).not_finite) {
      marked += (marked.empty() ? "" : ", ") + std::to_string(chosen[i]);
    }
  }
  expects(errc::not_finite, marked.empty(), call, ": expected finite rows, got NaN or Inf in head ",
          std::string_view(marked), " (as it was; all other heads have made their step)");
}

template <policy P>
void open_heads<P>::expect_rows(const char* call, const head_selection& chosen,
                                const step_input& in, std::span<float> out, index_t tokens) const {
  chosen.check(call, kv.heads());
  const head_ref any = kv.head(0);
  const index_t n = chosen.count(), group = any.group(), dim = any.dim(), of_v = any.value_dim();
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
void open_heads<P>::expect_positions(const char* call, const head_selection& chosen,
                                     const step_input& in, index_t tokens, bool taken) const {
  const index_t count = chosen.count(),
                requests = static_cast<index_t>(in.positions.size()) / tokens;
  expects(in.positions.empty() ||
              (in.positions.data() != nullptr && requests > 0 && count % requests == 0 &&
               in.positions.size() == as_size(requests, tokens)),
          call, ": expected positions [", tokens, ", requests] of ", count, " heads, got ",
          in.positions.size());
  for (index_t i = 0; i < count; ++i) {
    const index_t h = chosen[i], next = kv.head(h).next_position();
    if (in.positions.empty()) {
      // A layer without tokens is asked by its own first one.
      const index_t before = kv.in_layer_before(h), other = kv.head(before).next_position(),
                    wanted = next + (taken && !kv.in_first_layer(h) ? 1 : 0);
      expects(before == h || other == 0 || other == wanted, call,
              ": expected each token once in every layer, in their order, got head ", h,
              " at position ", next, " and head ", before, " of the layer ",
              kv.in_first_layer(h) ? "that is last" : "before", " at ", other);
      continue;
    }
    for (index_t t = 0; t < tokens; ++t) {
      const index_t got = in.positions[as_size(t * requests + i / (count / requests))];
      expects(got == next + t, call, ": expected position ", next + t, " of head ", h, ", got ",
              got);
    }
  }
}

template <policy P>
void open_heads<P>::expect_alike(const char* call, const head_selection& chosen) const {
  const index_t n = policies.alike() ? kv.head(0).spec().kv_heads : 0;
  for (index_t i = 0; i < chosen.count() && n > 0; ++i) {
    const index_t h = chosen[i], first = h - h % n;
    const head_ref own = kv.head(h), like = kv.head(first);
    bool same = chosen.count() % n == 0 && chosen[i - i % n] + i % n == h && h % n == i % n &&
                own.length() == like.length() && own.next_position() == like.next_position();
    for (index_t s = 0; same && s < own.length(); ++s) {
      same = own.position(s) == like.position(s);
    }
    expects(same || (policies.is_cut(h) && policies.is_cut(chosen[i - i % n])), call,
            ": expected all heads of each layer, with the same tokens, ", "got head ", h,
            " without head ", first, "'s");
  }
}

template <policy P>
void open_heads<P>::average(const head_selection& chosen, bool only_due) {
  const index_t n = policies.alike() ? kv.head(0).spec().kv_heads : 0;
  for (index_t i = 0; i < chosen.count() && n > 0; i += n) {
    if (policies.alike(chosen[i]) && (!only_due || is_due(chosen[i]))) {
      average_scores(n, [&](index_t k) -> head_state& {
        of(chosen[i + k]).state.extend(seen_length(chosen[i + k]));
        leave(chosen[i + k]);
        return of(chosen[i + k]).state;
      });
    }
  }
}

template <policy P>
bool open_heads<P>::due_alike(const head_selection& chosen) {
  const index_t n = kv.head(0).spec().kv_heads;
  bool any = false;
  for (index_t i = 0; i < chosen.count(); i += n) {
    // A layer that is cut may be in parts, whose heads evict by themselves.
    const index_t end = std::min(i + n, chosen.count());
    bool all = policies.alike(chosen[i]) && is_due(chosen[i]);
    for (index_t k = i; k < end; ++k) {
      all = all && kv.head(chosen[k]).length() == kv.head(chosen[i]).length();
    }
    if (all) {
      average(head_range{chosen[i], n}, true);
    }
    for (index_t k = i; k < end; ++k) {
      of(chosen[k]).due = all;
    }
    any = any || all;
  }
  return any;
}

template <policy P>
void open_heads<P>::gather(const char* call, const head_selection& chosen) {
  for (index_t i = 0; i < chosen.count(); ++i) {
    const index_t h = chosen[i];
    const head_ref head = kv.head(h);
    one_head& one = of(h);
    if (!awaits_pins(h) || one.gathered >= head.next_position()) {
      continue;
    }
    admit(call, h, open::last_of_prompt);
    for (index_t s = one.kept.count(); s < head.length() && kv.in_pages(); ++s) {
      if (pins_of(h).has(head.position(s))) {
        kv.expect_own_pages(call, h, one.kept.count(), head.length());
        break;
      }
    }
    one.gathered = head.next_position();
    if (one.state.rests()) {
      one.state.extend(known_slots(h));
    }
    const index_t pinned = gather_pinned(head, one.state, one.kept.count(), pins_of(h));
    one.kept.pinned += pinned;
    one.limit = policies.limit_without(h, one.limit, pinned);  // until a prompt ends
    leave(h);
  }
}

}  // namespace kvmeld::inline v0::detail
