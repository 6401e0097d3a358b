// SPDX-License-Identifier: MIT
/// Slots that are sealed, as those of a prefix that requests share: policies see what lies behind
/// them as a head of its own, attention sees all.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::log
#include <limits>     // std::numeric_limits

#include "kvmeld/compress/one_head.hpp"

namespace kvmeld::inline v0::detail {

/// What a policy sees of a head: the slots behind those that are sealed, or all. What becomes of
/// its length has become of the head's when this ends.
class seen_head {
 public:
  seen_head(const head_ref& head, index_t sealed)
      : sealed_(sealed),
        length_(head.length() - sealed),
        of_head_(head.metadata().length),
        seen_(sealed > 0 ? head.behind(sealed, length_) : head) {}
  seen_head(const seen_head&) = delete;
  seen_head& operator=(const seen_head&) = delete;
  ~seen_head() {
    if (sealed_ > 0) {
      *of_head_ = sealed_ + length_;
    }
  }

  const head_ref& head() const { return seen_; }

 private:
  index_t sealed_, length_;
  index_t* of_head_;
  head_ref seen_;
};

/// `try_step` of a head whose first slots are sealed: `out` is attention over all slots; the policy
/// attends to those behind the seal, and observes that. The token is pushed twice, to one place.
template <policy P>
KVMELD_NOINLINE bool try_sealed_step(const P& p, const head_ref& head, index_t sealed,
                                     head_state& state, workspace& work, const float* q,
                                     const float* k, const float* v, const budget& b, float* out) {
  if (!all_finite(q, head.group() * head.dim())) {
    return false;  // attention refuses such queries where the model checks for them
  }
  work.reserve(head);
  const index_t length = head.length(), next = head.next_position();
  head.push(k, v);
  hooks(p).attend(head, state, q, out, {}, {});
  head.restore(length, next);
  const seen_head seen(head, sealed);
  return all_finite(out, head.group() * head.value_dim()) &&
         try_step(p, seen.head(), state, work, q, k, v, b, work.own_output.data());
}

/// Attention over all slots, `work.attention [group, length]`, as it is within those behind the
/// seal, in place: what `try_sealed_step` would have observed. A learned sink stays beside them, by
/// its share of `log_sum_exp [group]`, which may be empty where there is none.
inline observation observed_behind(const head_ref& head, index_t sealed, workspace& work,
                                   std::span<const float> log_sum_exp) {
  const index_t n = head.length(), own = n - sealed;
  const float* const sinks = head.of_group(head.spec().sink_logits);
  for (index_t g = 0; g < head.group(); ++g) {
    const float* const from = work.attention.data() + as_size(g, n) + sealed;
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
