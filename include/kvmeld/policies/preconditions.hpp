// SPDX-License-Identifier: MIT
/// What a policy is refused: budgets that it cannot hold, models that it does not go with.
#pragma once

#include "kvmeld/budget.hpp"
#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/policies/traits.hpp"

namespace kvmeld::inline v0 {

/// Throws unless `p` can hold a head of this capacity within `b`.
template <policy P>
void check(const P& p, const budget& b, index_t capacity) {
  traits::validate(p);
  if (!traits::evicts(p)) {
    return;
  }
  expects(b.slots > 0, p.name(), ": expected a budget of at least 1 slot, got ", b.slots);
  if (!traits::accepts(p, b.slots)) {
    expects(false, p.name(), ": expected a budget of at least ", traits::min_budget(p),
            " slots (protected tokens and one more), got ", b.slots);
  }
  expects(b.slots <= capacity, p.name(), ": expected a capacity of at least ", b.slots,
          " slots (the budget), got ", capacity);
  expects(b.trigger == 0 || b.trigger > b.slots, p.name(), ": expected a trigger above ", b.slots,
          " slots (the target), got ", b.trigger);
}

namespace detail {

/// Throws unless `p` goes with the attention of a layer; `call` begins the message.
template <policy P>
void expect_attention(const char* call, const P& p, const attention_spec& spec) {
  const attention_support can = traits::supports(p);
  const auto expect = [&](const char* what, bool is_there, bool may_be) {
    expects(errc::unsupported, !is_there || may_be, call, p.name(), ": expected attention without ",
            what, " (", can.why, "), got some");
  };
  expect("soft_cap", spec.soft_cap != 0, can.soft_cap);
  expect("sink_logits", !spec.sink_logits.empty(), can.sinks);
  expect("alibi_slopes", !spec.alibi_slopes.empty(), can.alibi);
}

/// Throws unless `p` goes with where a head has its values.
template <policy P>
void expect_memory(const char* call, const P& p, const head_ref& head) {
  expects(errc::unsupported, !head.one_memory() || traits::supports(p).one_memory, call, p.name(),
          ": expected values in memory of their own (it weights keys and values differently, or "
          "corrects them), got values in the keys' memory");
}

/// Throws unless `p` can leave the first slots of a head as they are.
template <policy P>
void expect_seals(const char* call, const P& p) {
  expects(errc::unsupported, traits::supports(p).seals, call, p.name(),
          ": expected a policy that can leave slots as they are (it keeps numbers of all slots, or "
          "moves the first ones), got one that cannot");
}

}  // namespace detail

/// Throws unless `p` goes with what a model computes in a layer (`unsupported`): which policy goes
/// with what is a table in docs/reference/policies.md.
template <policy P>
void check(const P& p, const attention_spec& spec) {
  traits::validate(p);
  detail::expect_attention("", p, spec);
}

}  // namespace kvmeld::inline v0
