// SPDX-License-Identifier: MIT
/// Slots that stay as they are: those that are sealed, as of a prefix that requests share, and the
/// pinned ones after them. Policies see the slots after these as a head of its own, attention sees
/// all.
#pragma once

#include <algorithm>  // std::max, std::ranges::find_if
#include <cmath>      // std::log
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/compress/one_head.hpp"

namespace kvmeld::inline v0::detail {

/// How many of a head's first slots no policy sees.
struct kept_slots {
  index_t sealed = 0;  ///< no call changes these, but that newest rows are rounded
  index_t pinned = 0;  ///< after them; of tokens that the policy may not evict or merge

  index_t count() const { return sealed + pinned; }
};

/// The pinned tokens of a request.
class pinned_tokens {
 public:
  bool has(index_t position) const {
    return std::ranges::any_of(
        spans_, [&](const span& t) { return position >= t.first && position < t.end; });
  }
  /// One more than the last of them; 0: there are none.
  index_t end() const { return spans_.empty() ? 0 : spans_.back().end; }
  /// How many are at position `first` or after it.
  std::int64_t count_from(index_t first) const {
    std::int64_t count = 0;
    for (const span& t : spans_) {
      count += std::max(t.end - std::max(t.first, first), index_t{0});
    }
    return count;
  }
  /// Pins the tokens from `first` to `end` − 1 too.
  void add(index_t first, index_t end) {
    if (first == end) {
      return;
    }
    const auto from = std::ranges::find_if(spans_, [&](const span&t) { return t.end >= first; }),
               to = std::find_if(from, spans_.end(), [&](const span&t) { return t.first > end; });
    if (from != to) {
      first = std::min(first, from->first), end = std::max(end, (to - 1)->end);
    }
    spans_.insert(spans_.erase(from, to), {first, end});
  }

 private:
  struct span {
    index_t first, end;
  };
  std::vector<span> spans_;  // ascending, apart
};

/// Moves the slots from `first` on that hold `pinned` tokens to slot `first` and on, all others
/// after them, each in their order, with the numbers that `state` has of them; those of the pinned
/// ones are dropped. `first`: the slot of the state's first numbers. Returns how many.
inline index_t gather_pinned(const head_ref& head, head_state& state, index_t first,
                             const pinned_tokens& pinned) {
  const index_t n = head.length();
  const storage_pair type = head.type();
  const index_t dims[] = {head.dim(), head.own_value_dim()};
  const std::size_t bytes[] = {row_bytes(type.keys, dims[0]), row_bytes(type.values, dims[1])};
  std::vector<index_t> slots;
  for (index_t s = first; s < n; ++s) {
    if (pinned.has(head.position(s))) {
      slots.push_back(s);
    }
  }
  if (slots.empty()) {
    return 0;
  }
  const auto is_pinned = [&](index_t s) { return std::ranges::binary_search(slots, s); };
  index_t measured = 0;  // of the others
  for (index_t s = first; s < first + state.length(); ++s) {
    if (!is_pinned(s)) {
      for (index_t c = 0; c < state.slot_stats(); ++c) {
        state.column(c)[as_size(measured)] = state.column(c)[as_size(s - first)];
      }
      ++measured;
    }
  }
  state.truncate(measured);
  const auto copy = [&](const row<any_scalar>& key_to, const row<any_scalar>& value_to,
                        const row<any_scalar>& key, const row<any_scalar>& value) {
    copy_row(key_to, key, dims[0]), copy_row(value_to, value, dims[1]);
  };
  std::vector<std::byte> keys(bytes[0] * slots.size()), values(bytes[1] * slots.size());
  std::vector<float> log_mass;
  std::vector<index_t> position;
  const auto row_in = [](std::vector<std::byte>& rows, std::size_t each, std::size_t i,
                         storage scalar) {
    return row<any_scalar>{rows.data() + i * each,
                           static_cast<std::ptrdiff_t>(element_bytes(scalar)), scalar};
  };
  const auto key_of = [&](std::size_t i) { return row_in(keys, bytes[0], i, type.keys); };
  const auto value_of = [&](std::size_t i) { return row_in(values, bytes[1], i, type.values); };
  for (std::size_t i = 0; i < slots.size(); ++i) {
    copy(key_of(i), value_of(i), head.held_key(slots[i]), head.held_value(slots[i]));
    log_mass.push_back(head.log_mass(slots[i])), position.push_back(head.position(slots[i]));
  }
  for (index_t s = slots.back() - 1, to = slots.back(); s >= first; --s) {
    if (!is_pinned(s)) {
      copy(head.held_key(to), head.held_value(to), head.held_key(s), head.held_value(s));
      head.log_mass(to) = head.log_mass(s), head.position(to) = head.position(s);
      --to;
    }
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const index_t to = first + static_cast<index_t>(i);
    copy(head.held_key(to), head.held_value(to), key_of(i), value_of(i));
    head.log_mass(to) = log_mass[i], head.position(to) = position[i];
  }
  return static_cast<index_t>(slots.size());
}

/// What a policy sees of a head: the slots after those that are kept, or all. What becomes of its
/// length has become of the head's when this ends.
class seen_head {
 public:
  seen_head(const head_ref& head, const kept_slots& kept)
      : kept_(kept.count()),
        length_(head.length() - kept_),
        of_head_(head.metadata().length),
        seen_(kept_ > 0 ? head.behind(kept_, kept.sealed, length_) : head) {}
  seen_head(const seen_head&) = delete;
  seen_head& operator=(const seen_head&) = delete;
  ~seen_head() {
    if (kept_ > 0) {
      *of_head_ = kept_ + length_;
    }
  }

  const head_ref& head() const { return seen_; }

 private:
  index_t kept_, length_;
  index_t* of_head_;
  head_ref seen_;
};

/// `try_step` of a head whose first slots are kept: `out` is attention over all slots; the policy
/// attends to those after them, and observes that. The token is pushed twice, to one place.
template <policy P>
KVMELD_NOINLINE bool try_kept_step(const P& p, const head_ref& head, const kept_slots& kept,
                                   head_state& state, workspace& work, const float* q,
                                   const float* k, const float* v, const budget& b, float* out) {
  if (!all_finite(q, head.group() * head.dim())) {
    return false;  // attention refuses such queries where the model checks for them
  }
  work.reserve(head);
  const index_t length = head.length(), next = head.next_position();
  const displaced_row displaced(head, work.displaced.data() + as_size(2, head.row_dim()));
  head.push(k, v);
  declared(p).attend(head, state, q, out, {}, {});
  head.restore(length, next);
  const seen_head seen(head, kept);
  if (all_finite(out, head.group() * head.value_dim()) &&
      try_step(p, seen.head(), state, work, q, k, v, b, work.own_output.data())) {
    return true;
  }
  displaced.put_back();
  return false;
}

/// Attention over all slots, `work.attention [group, length]`, as it is within those after the
/// first `kept`, in place: what `try_kept_step` would have observed. A learned sink stays in
/// addition to them, by its share of `log_sum_exp [group]`, which may be empty where there is none.
inline observation observed_behind(const head_ref& head, index_t kept, workspace& work,
                                   std::span<const float> log_sum_exp) {
  const index_t n = head.length(), own = n - kept;
  const float* const sinks = head.of_group(head.spec().sink_logits);
  for (index_t g = 0; g < head.group(); ++g) {
    const float* const from = work.attention.data() + as_size(g, n) + kept;
    float* const to = work.attention.data() + as_size(g, own);
    float all = sinks != nullptr ? std::exp(sinks[g] - log_sum_exp[as_size(g)]) : 0.0F;
    for (index_t s = 0; s < own; ++s) {
      all += from[s];
    }
    all = std::max(all, std::numeric_limits<float>::min());  // all attention may be before the seal
    for (index_t s = 0; s < own; ++s) {
      to[s] = from[s] / all;
    }
    if (!log_sum_exp.empty()) {
      work.log_sum_exp[as_size(g)] = log_sum_exp[as_size(g)] + std::log(all);
    }
  }
  return {.probabilities = std::span(work.attention).first(as_size(head.group(), own)),
          .log_sum_exp = std::span(work.log_sum_exp).first(log_sum_exp.size())};
}

/// How many slots of head `h` hold its request's first `tokens` tokens. Refused: what `seal`
/// refuses. `all`: the compressor's `open_heads`.
index_t expect_seal(const auto& all, index_t h, index_t tokens) {
  const head_ref head = all.kv.head(h);
  const auto& one = all.of(h);
  const index_t n = head.length();
  expects(tokens >= 0 && tokens <= head.next_position(), "seal: expected 0 to ",
          head.next_position(), " tokens (those appended), got ", tokens);
  index_t sealed = 0;
  while (sealed < n && head.position(sealed) < tokens) {
    ++sealed;
  }
  for (index_t s = sealed; s < n; ++s) {
    expects(head.position(s) >= tokens, "seal: expected the slots of the first ", tokens,
            " tokens before all others, got token ", head.position(s), " in slot ", s, " of head ",
            h, " (steps put new tokens into freed slots)");
  }
  expects(sealed >= one.kept.sealed, "seal: expected at least the ", one.kept.sealed,
          " slots that are sealed already in head ", h, ", got ", sealed);
  if (sealed > one.kept.sealed) {
    expects(all.pins_of(h).end() == 0,
            "seal: expected tokens to be pinned after it, got some that are");
    all.policies.with(h, [](const auto& p) { expect_seals("seal: ", p); });
    expects(sealed % head.page_slots() == 0, "seal: expected whole pages of ", head.page_slots(),
            " slots, got ", sealed, " slots in head ", h);
    const index_t known = one.kept.sealed + all.known_slots(h);
    expects(known <= sealed, "seal: expected tokens after the first ", tokens,
            " that were not measured yet, got ", known - sealed, " in head ", h);
    all.policies.expect_room("seal", h, {.sealed = sealed}, one.limit);
    all.policies.expect_given_kept("seal", h);
  }
  return sealed;
}

/// Refused: `pinned` tokens for which head `h` is too small, or its policy's; new ones that begin
/// with token `first`, of which it may lack some.
void expect_pins(const auto& all, index_t h, index_t first, const pinned_tokens& pinned) {
  const head_ref head = all.kv.head(h);
  const auto& one = all.of(h);
  all.policies.expect_given_kept("pin", h);
  index_t sealed = 0;  // tokens
  for (index_t s = 0; s < one.kept.sealed; ++s) {
    sealed = std::max(sealed, head.position(s) + 1);
  }
  expects(first < sealed || first >= one.compressed, "pin: expected tokens from ", one.compressed,
          " on (earlier ones are compressed), got ", first, " in head ", h);
  all.policies.with(h, [&](const auto& p) {
    expect_seals("pin: ", p);
    const std::int64_t slots = all.policies.slots_of(h), least = declared(p).min_budget(),
                       count = pinned.count_from(sealed);
    expects(count <= slots - least, "pin: expected at most ",
            std::max(slots - least, std::int64_t{0}), " tokens in all (", slots,
            " slots of the budget, of which ", p.name(), " needs ", least, "), got ", count);
  });
}

}  // namespace kvmeld::inline v0::detail
