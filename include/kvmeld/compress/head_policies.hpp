// SPDX-License-Identifier: MIT
/// What each head of a request is brought to, and by what: its policy and budget, or its layer's
/// window.
#pragma once

#include <algorithm>  // std::min, std::max, std::ranges::any_of
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvmeld/compress/kept_slots.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/compress/slots_in_bytes.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/policies/declared.hpp"

namespace kvmeld::inline v0::detail {

/// What heads are cut by whose layer has a window: the newest tokens stay, the others are seen by
/// no later query. Exact: it is no choice, and no policy is asked.
struct window_cut {
  bool reaches = true;  ///< has a head slots for more tokens than its window? Else all stay

  static constexpr std::string_view name() { return "window"; }
  bool evicts() const { return reaches; }
  index_t score(const head_ref& head, const head_state&, index_t slot) const {
    return head.position(slot);
  }
};

/// Policies and budgets of the heads of a request, checked, as all requests have them. A value.
template <policy P>
class head_policies {
 public:
  head_policies(const cache_ref& kv, std::span<const P> policies, std::span<const budget> budgets,
                const observation_needs& given);

  const P& policy_of(index_t h) const { return at(h).policy; }
  /// Calls `f` with what head `h` is compressed by.
  decltype(auto) with(index_t h, const auto& f) const {
    const own& head = at(h);
    return head.cut ? f(*head.cut) : f(head.policy);
  }
  bool is_cut(index_t h) const { return at(h).cut.has_value(); }
  bool evicts(index_t h) const {
    return with(h, [](const auto& p) { return declared(p).evicts(); });
  }
  /// Do the scores of all layers decide how many slots head `h` has?
  bool shares(index_t h) const { return !is_cut(h) && at(h).limit.is_shared; }
  /// Are there heads of which they do?
  bool any_shares() const { return last_shared_ >= 0; }
  /// Is it of the last layer whose heads do?
  bool in_last_shared(index_t h) const {
    return shares(h) && kv_.in_request(h) / kv_.head(h).spec().kv_heads == last_shared_;
  }
  /// Are they equal for the heads of a layer?
  bool shares_by_layer(index_t h) const { return shares(h) && at(h).limit.by_layer; }
  /// Do heads of layers without a window keep the same tokens?
  bool alike() const { return alike_; }
  bool alike(index_t h) const { return alike_ && !is_cut(h); }
  /// Slots that a prompt of head `h` is brought to, unless it shares them.
  index_t slots_of(index_t h) const {
    return is_cut(h) ? kv_.head(h).spec().window : at(h).limit.slots;
  }

  /// The most slots that head `h` is given where it shares them, in addition to its `kept` ones and
  /// with room for `next` tokens of another chunk.
  index_t most_of(index_t h, const kept_slots& kept, index_t next) const {
    const budget& b = at(h).limit;
    const index_t room = kv_.head(h).capacity() - kept.sealed - std::max(b.slack + 1, next);
    return std::max(b.slots, b.most > 0 ? std::min(b.most, room) : room) - kept.pinned;
  }

  /// What a head of `slots` slots after its prompt, and those `kept`, is held to while decoding:
  /// without the latter.
  budget decode_limit(index_t h, index_t slots, const kept_slots& kept = {}) const {
    if (is_cut(h)) {
      return {slots_of(h)};
    }
    const budget& b = at(h).limit;
    if (b.trigger > 0 && evicts(h)) {
      return {slots, std::max(b.trigger - kept.pinned, slots + 1)};
    }
    return budget_within(policy_of(h),
                         std::min(slots + b.slack, kv_.head(h).capacity() - kept.count() - 1));
  }
  /// The slots that `decode_limit` made `limit` of.
  index_t shared_part(index_t h, const budget& limit) const {
    const budget& b = at(h).limit;
    return b.trigger > 0 ? limit.slots : limit.trigger_length() - 1 - b.slack;
  }
  /// What a head that is held to `limit` is held to once `pinned` of its slots are kept: so many
  /// less, but no fewer than its policy needs.
  budget limit_without(index_t h, const budget& limit, index_t pinned) const {
    const P& p = policy_of(h);
    const index_t least = declared(p).min_budget(), slots = std::max(limit.slots - pinned, least);
    return at(h).limit.trigger > 0
               ? budget{slots, std::max(limit.trigger - pinned, slots + 1)}
               : budget_within(p, std::max(limit.trigger_length() - 1 - pinned, least));
  }
  /// `limit` of head `h` as its next plan has it, after `tokens` in all. Where the policy says how
  /// many slots it frees at once, layers take turns by the number of tokens: a step plans for few
  /// of them, and heads of a layer stay equally long. The first plan frees as many slots as there
  /// are tokens until the layer's turn.
  budget in_turn(index_t h, const budget& limit, index_t tokens) const {
    const index_t batch = limit.trigger_length() - limit.slots;
    if (is_cut(h) || at(h).limit.trigger > 0 || batch == 1) {
      return limit;
    }
    const auto turn = static_cast<index_t>(std::int64_t{at(h).turn} * batch / compressed_layers_);
    return {limit.trigger_length() - batch + (tokens + batch - turn) % batch, limit.trigger};
  }
  /// The fewest slots that head `h` can decode with, where it is held to `limit` after its `kept`
  /// ones: of the budget, which counts the pinned ones, or more.
  std::int64_t least_capacity(index_t h, const budget& limit, const kept_slots& kept) const {
    return with(h, [&](const auto& p) -> std::int64_t {
      if (!declared(p).evicts()) {
        return std::int64_t{kept.sealed} + 1;
      }
      const std::int64_t decoding = declared(p).supports_decode() ? 1 : 0,
                         slack = is_cut(h) ? 0 : at(h).limit.slack;
      return kept.sealed +
             std::max(slots_of(h) + slack + decoding,
                      decoding * (std::int64_t{kept.pinned} + limit.trigger_length()));
    });
  }
  /// Refused: a head without room for a budget and a token after its `kept` slots.
  void expect_room(const char* call, index_t h, const kept_slots& kept, const budget& limit) const {
    const std::int64_t least = least_capacity(h, limit, kept);
    expects(errc::no_capacity, least <= kv_.head(h).capacity(), call,
            ": expected a capacity of at least ", least,
            " slots (sealed, budget and the new token), got ", kv_.head(h).capacity());
  }

  /// Refused: a step's attention without what the policy of head `h` needs of it.
  void expect_given(const char* call, index_t h, const observation_needs& given) const {
    with(h, [&](const auto& p) { expect_given(call, p, given); });
  }
  /// Refused where slots are kept: a policy that needs the log-sum-exp without probabilities, which
  /// say how much of it lies there; one that needs probabilities without a log-sum-exp where
  /// attention has sinks, whose share it says. `given`: at construction.
  void expect_given_kept(const char* call, index_t h, const observation_needs& given) const {
    with(h, [&](const auto& p) {
      const observation_needs needs = declared(p).needs();
      expects(!needs.log_sum_exp || given.probabilities, call,
              ": expected the step's probabilities behind a seal (", p.name(),
              " needs the log_sum_exp), got none");
      expects(!needs.probabilities || given.log_sum_exp || kv_.head(h).spec().sink_logits.empty(),
              call, ": expected the step's log_sum_exp behind a seal where attention has sinks (",
              p.name(), " needs the probabilities), got none");
    });
  }
  void expect_given_kept(const char* call, index_t h) const { expect_given_kept(call, h, given_); }

 private:
  struct own {
    P policy;
    budget limit;
    std::optional<window_cut> cut;
    index_t turn;  ///< which of the layers without a window it is in
  };

  const own& at(index_t h) const { return of_request_[as_size(kv_.in_request(h))]; }

  void expect_one_or_each(const char* what, const void* data, std::size_t count) const {
    expects(data != nullptr || count == 0, "compressor: expected ", what, ", got null");
    expects(count == 1 || count == as_size(kv_.per_request()), "compressor: expected ", what,
            ": one, or one for each of ", kv_.per_request(), " heads of a request, got ", count);
  }
  static void expect_given(const char* call, const auto& p, const observation_needs& given) {
    const observation_needs needs = declared(p).needs();
    const auto expect = [&](const char* what, bool needed, bool has) {
      expects(!needed || has, call, ": expected the step's ", what, " (", p.name(),
              " needs it), got none");
    };
    expect("probabilities", needs.probabilities, given.probabilities);
    expect("log_sum_exp", needs.log_sum_exp, given.log_sum_exp);
    expect("query", needs.query, given.query);
  }
  static void check_head(const P& p, const budget& b, const observation_needs& given,
                         const head_ref& head);

  cache_ref kv_;
  observation_needs given_;        // by an engine with its own attention
  std::vector<own> of_request_;    // [layers · kv_heads]
  index_t compressed_layers_ = 0;  // those without a window
  index_t last_shared_ = -1;       // the last layer whose heads share slots
  bool alike_ = false;
};

// Not in the class: what is inline is compiled by every file, `extern template` or not.

template <policy P>
head_policies<P>::head_policies(const cache_ref& kv, std::span<const P> policies,
                                std::span<const budget> budgets, const observation_needs& given)
    : kv_(kv), given_(given) {
  expect_one_or_each("policies", policies.data(), policies.size());
  expect_one_or_each("budgets", budgets.data(), budgets.size());
  const auto of = [](const auto& one_or_each, index_t i) -> const auto& {
    return one_or_each[one_or_each.size() == 1 ? 0 : as_size(i)];
  };
  budget found;
  if (std::ranges::any_of(budgets, [](const budget& b) { return b.size != 0; })) {
    const budget& b = budgets.front();
    expects(budgets.size() == 1 && policies.size() == 1,
            "compressor: expected one policy and one budget for all heads where it is in bytes, "
            "got ",
            policies.size(), " and ", budgets.size());
    expects(b.slots == 0 && b.trigger == 0,
            "compressor: expected bytes without slots and trigger, got ", b.slots, " and ",
            b.trigger, " slots");
    expects(b.slack >= 0, "compressor: expected a slack of at least 0 slots, got ", b.slack);
    declared(policies.front()).validate();
    found = in_slots(b, policies.front(), kv_);
    budgets = {&found, 1};
  }
  const P* sharing = nullptr;  // the policy of the head before
  const index_t of_layer = kv_.head(0).spec().kv_heads;
  for (index_t i = 0; i < kv_.per_request(); ++i) {
    const budget& b = of(budgets, i);
    const P& p = of(policies, i);
    const head_ref head = kv_.head(kv_.of_request(0, i));
    const index_t window = head.spec().window;
    compressed_layers_ += i % of_layer == 0 && window == 0 ? 1 : 0;
    of_request_.push_back({p, b, std::nullopt, compressed_layers_ - 1});
    own& added = of_request_.back();
    if (window > 0) {
      added.cut = window_cut{window < head.capacity()};
      continue;
    }
    expects(b.slots >= 0, "compressor: expected a budget of at least 0 slots, got ", b.slots);
    expects(b.slack >= 0, "compressor: expected a slack of at least 0 slots, got ", b.slack);
    expects(b.slack == 0 || b.trigger == 0, "compressor: expected a trigger or slack, got ",
            b.trigger, " and ", b.slack, " slots");
    expects(b.is_shared || (b.most == 0 && !b.by_layer && !b.alike),
            "compressor: expected a shared budget with a cap, equal heads of a layer or the same "
            "tokens, got one that is not shared");
    expects(b.by_layer || !b.alike,
            "compressor: expected equal heads of a layer with the same tokens, got others");
    expects(!b.is_shared || budgets.size() == 1,
            "compressor: expected one shared budget for all heads, got ", budgets.size());
    expects(!b.alike || policies.size() == 1,
            "compressor: expected one policy for the same tokens, got ", policies.size());
    declared(p).validate();
    expects(!b.is_shared || sharing == nullptr || declared(p) == declared(*sharing),
            "compressor: expected one policy with equal options where heads share a budget, got ",
            p.name(), " and ", sharing == nullptr ? p.name() : sharing->name(),
            " (their scores are of different units, or kept elsewhere)");
    sharing = &p;
    if (b.is_shared) {
      last_shared_ = i / of_layer;
      added.policy = for_shared(p, b.slots, b.slack, b.alike);
    }
    alike_ = b.is_shared && b.alike && of_layer > 1;
    check_head(added.policy, b, given, head);
  }
}

template <policy P>
void head_policies<P>::check_head(const P& p, const budget& b, const observation_needs& given,
                                  const head_ref& head) {
  expect_attention("compressor: ", p, head.spec());
  expect_memory("compressor: ", p, head);
  const index_t capacity = head.capacity();
  check(p, {b.slots, b.trigger}, capacity);
  if (!declared(p).evicts()) {
    return;
  }
  expects(b.most == 0 || b.most >= b.slots, "compressor: expected a cap of at least ", b.slots,
          " slots a head (the mean that heads share), got ", b.most);
  if (!declared(p).supports_decode()) {
    expects(errc::unsupported, b.trigger == 0 && b.slack == 0, p.name(),
            ": expected a policy that decodes where a budget has a trigger or slack, got one for "
            "prompts only");
    return;
  }
  expect_given("compressor", p, given);
  expects(errc::no_capacity, std::int64_t{b.slots} + b.slack < capacity,
          "compressor: expected a capacity of at least ", std::int64_t{b.slots} + b.slack + 1,
          " slots (budget, slack and the new token), got ", capacity);
  expects(errc::no_capacity, b.trigger <= capacity, "compressor: expected a capacity of at least ",
          b.trigger, " slots (the trigger), got ", capacity);
}

}  // namespace kvmeld::inline v0::detail
