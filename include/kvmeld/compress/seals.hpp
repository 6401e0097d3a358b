// SPDX-License-Identifier: MIT
/// Slots that stay as they are: those that are sealed, as of a prefix that requests share, and the
/// pinned ones after them. Policies see the slots after these as a head of its own, attention sees
/// all.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::log
#include <limits>     // std::numeric_limits

#include "kvmeld/compress/one_head.hpp"

namespace kvmeld::inline v0::detail {

/// How many of a head's first slots no policy sees.
struct kept_slots {
  index_t sealed = 0;  ///< no call changes these
  index_t pinned = 0;  ///< after them; of tokens that the policy may not evict or merge

  index_t count() const { return sealed + pinned; }
};

/// Moves the slots from `first` on for whose position `is_pinned` to slot `first` and on, all
/// others after them, each in their order, with the numbers that `state` has of them; then those of
/// the pinned ones are dropped. `first`: the slot of the state's first numbers. Returns how many.
inline index_t gather_pinned(const head_ref& head, head_state& state, index_t first,
                             auto is_pinned) {
  const index_t n = head.length();
  std::vector<index_t> pinned, order;
  for (index_t s = first; s < n; ++s) {
    (is_pinned(head.position(s)) ? pinned : order).push_back(s);
  }
  if (pinned.empty()) {
    return 0;
  }
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    const std::span<float> column = state.column(c);
    std::size_t next = 0;
    for (const index_t s : order) {
      if (const auto i = as_size(s - first); i < column.size()) {
        column[next++] = column[i];
      }
    }
  }
  const auto measured =
      std::ranges::count_if(pinned, [&](index_t s) { return s - first < state.length(); });
  state.truncate(state.length() - static_cast<index_t>(measured));
  // Slot `first + i` gets what `order[i]` has: cycle by cycle, one slot in hand.
  order.insert(order.begin(), pinned.begin(), pinned.end());
  const storage_pair type = head.type();
  const index_t dims[] = {head.dim(), head.own_value_dim()};
  std::vector<std::byte> hand[] = {std::vector<std::byte>(row_bytes(type.keys, dims[0])),
                                   std::vector<std::byte>(row_bytes(type.values, dims[1]))};
  const row<any_scalar> key{hand[0].data(), static_cast<std::ptrdiff_t>(element_bytes(type.keys)),
                            type.keys},
      value{hand[1].data(), static_cast<std::ptrdiff_t>(element_bytes(type.values)), type.values};
  for (index_t start = first; start < n; ++start) {
    if (order[as_size(start - first)] == start) {
      continue;
    }
    copy_row(key, head.key(start), dims[0]), copy_row(value, head.value(start), dims[1]);
    const float log_mass = head.log_mass(start);
    const index_t position = head.position(start);
    index_t to = start;
    for (index_t from = order[as_size(to - first)]; from != start;
         from = order[as_size(to - first)]) {
      copy_row(head.key(to), head.key(from), dims[0]);
      copy_row(head.value(to), head.value(from), dims[1]);
      head.log_mass(to) = head.log_mass(from), head.position(to) = head.position(from);
      order[as_size(to - first)] = to;
      to = from;
    }
    copy_row(head.key(to), key, dims[0]), copy_row(head.value(to), value, dims[1]);
    head.log_mass(to) = log_mass, head.position(to) = position;
    order[as_size(to - first)] = to;
  }
  return static_cast<index_t>(pinned.size());
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
  head.push(k, v);
  declared(p).attend(head, state, q, out, {}, {});
  head.restore(length, next);
  const seen_head seen(head, kept);
  return all_finite(out, head.group() * head.value_dim()) &&
         try_step(p, seen.head(), state, work, q, k, v, b, work.own_output.data());
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

}  // namespace kvmeld::inline v0::detail
