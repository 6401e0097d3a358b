// SPDX-License-Identifier: MIT
/// A compressor's `seal`, and what seals need of a head.
#pragma once

#include "kvmeld/compress/observe_calls.hpp"

namespace kvmeld::inline v0::detail {

/// What `compressor` says of it is not said again here.
template <policy P>
class seal_calls : protected observe_calls<P> {
 protected:
  using base = observe_calls<P>;
  using base::base;
  using base::kv_, base::of, base::by_policy;
  using typename base::one_head;

  void seal(index_t request, index_t tokens) {
    this->expect_between("seal", request);
    const std::vector<index_t> heads = this->heads_of("seal", request);
    std::vector<index_t> sealed;
    for (const index_t h : heads) {
      sealed.push_back(expect_seal(h, tokens));
    }
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const index_t h = heads[i];
      if (of(h).sealed != sealed[i]) {
        of(h).state.clear();
        hold_to(h, this->decode_limit(h, this->slots_of(h), sealed[i]), sealed[i]);
      }
    }
  }

  /// How many slots of head `h` hold the request's first `tokens` tokens. Refused: what `seal`
  /// refuses.
  index_t expect_seal(index_t h, index_t tokens) const {
    const head_ref head = kv_.head(h);
    const one_head& one = of(h);
    const index_t n = head.length();
    expects(tokens >= 0 && tokens <= head.next_position(), "seal: expected 0 to ",
            head.next_position(), " tokens (those appended), got ", tokens);
    index_t sealed = 0;
    while (sealed < n && head.position(sealed) < tokens) {
      ++sealed;
    }
    for (index_t s = sealed; s < n; ++s) {
      expects(head.position(s) >= tokens, "seal: expected the slots of the first ", tokens,
              " tokens before all others, got token ", head.position(s), " in slot ", s,
              " of head ", h, " (steps put new tokens into freed slots)");
    }
    expects(sealed >= one.sealed, "seal: expected at least the ", one.sealed,
            " slots that are sealed already in head ", h, ", got ", sealed);
    if (sealed > one.sealed) {
      by_policy(h, [](const auto& p) { expect_seals("seal: ", p); });
      expects(sealed % head.page_slots() == 0, "seal: expected whole pages of ", head.page_slots(),
              " slots, got ", sealed, " slots in head ", h);
      expects(one.sealed + one.state.length() <= sealed, "seal: expected tokens after the first ",
              tokens, " that were not measured yet, got ", one.sealed + one.state.length() - sealed,
              " in head ", h);
      expect_room("seal", h, sealed, one.limit);
      this->expect_given_sealed("seal", h);
    }
    return sealed;
  }
  /// Refused: a head without room for a budget and a token behind `sealed` slots.
  void expect_room(const char* call, index_t h, index_t sealed, const budget& limit) const {
    const std::int64_t least = sealed + this->least_capacity(h, limit);
    expects(errc::no_capacity, least <= kv_.head(h).capacity(), call,
            ": expected a capacity of at least ", least,
            " slots (sealed, budget and the new token), got ", kv_.head(h).capacity());
  }

  /// Holds a head to `limit` from now on, with `sealed` slots and no prompt begun.
  void hold_to(index_t h, const budget& limit, index_t sealed) {
    of(h).limit = limit;
    of(h).sealed = sealed;
    of(h).held.release();
    this->leave(h);
  }
};

}  // namespace kvmeld::inline v0::detail
