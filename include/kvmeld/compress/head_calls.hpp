// SPDX-License-Identifier: MIT
/// What a compressor does with one head.
#pragma once

#include <limits>  // std::numeric_limits

#include "kvmeld/compress/compressor_base.hpp"
#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/policies/hooks.hpp"

namespace kvmeld::inline v0::detail {

template <policy P>
class head_calls : protected compressor_base<P> {
 protected:
  using base = compressor_base<P>;
  using base::base;
  using base::kv_, base::of, base::by_policy, base::slots_of, base::seen;
  using typename base::one_head, typename base::leaving;

  /// Takes what the policy wants of a chunk's queries, those of its `i`th head.
  void measure(index_t h, index_t i, const queries& q);
  /// Ends a head's prompt, or brings it to its budget where it is at its trigger.
  void to_limit(index_t h, workspace& work);
  /// One token of one head, as `try_step`.
  bool step_head(index_t h, const head_ref& head, workspace& work, const float* q, const float* k,
                 const float* v, float* out);
  /// Plans a head's prompt on what was kept of its queries, and holds it to `slots` from now on.
  /// A policy that throws once its plan was carried out has ended the prompt.
  void finish(index_t h, index_t slots, workspace& work);
  /// After a step: evicts where heads of a layer keep the same tokens, once all have made it.
  void evict_alike(const head_selection& heads, workspace& work);
};

// Not in the class: what is inline is compiled by every file, `extern template` or not.

template <policy P>
bool head_calls<P>::step_head(index_t h, const head_ref& head, workspace& work, const float* q,
                              const float* k, const float* v, float* out) {
  one_head& one = of(h);
  const leaving keeps{one, head};
  budget limit = one.limit;
  if (this->alike(h)) {
    limit.trigger = std::numeric_limits<index_t>::max();  // `evict_alike` follows
  }
  return by_policy(h, [&](const auto& p) {
    return one.sealed == 0
               ? try_step(p, head, one.state, work, q, k, v, limit, out)
               : try_sealed_step(p, head, one.sealed, one.state, work, q, k, v, limit, out);
  });
}

template <policy P>
void head_calls<P>::measure(index_t h, index_t i, const queries& q) {
  const seen_head behind_seal = seen(h);
  one_head& one = of(h);
  by_policy(h, [&](const auto& p) {
    q.of_head(i, [&](const auto& own) {
      observe_prompt(p, behind_seal.head(), one.state, one.held, own);
    });
  });
}

template <policy P>
void head_calls<P>::to_limit(index_t h, workspace& work) {
  const head_ref head = kv_.head(h);
  one_head& one = of(h);
  if (one.held.begun()) {
    finish(h, slots_of(h), work);
  } else if (one.limit.reached(head.length() - one.sealed)) {
    const leaving keeps{one, head};
    const seen_head behind_seal(head, one.sealed);
    by_policy(h, [&](const auto& p) {
      kvmeld::compress(p, behind_seal.head(), one.state, work, one.limit);
    });
  }
}

template <policy P>
void head_calls<P>::finish(index_t h, index_t slots, workspace& work) {
  one_head& one = of(h);
  const auto by_seen = [&](const auto& use) {
    const seen_head behind_seal = seen(h);
    if (const head_ref& head = behind_seal.head(); head.length() > 0) {
      by_policy(h, [&](const auto& p) { use(p, head); });
    }
  };
  by_seen([&](const auto& p, const head_ref& head) {
    const auto queries = planned_queries(p, head, one.state, one.held);
    bring_to(p, head, one.state, work, budget{slots}, queries);
  });
  one.limit = this->decode_limit(h, slots, one.sealed);
  one.held.release();
  this->leave(h);
  by_seen([&](const auto& p, const head_ref& head) {
    hooks(p).after_compress(head, one.state, slots);
  });
}

template <policy P>
void head_calls<P>::evict_alike(const head_selection& heads, workspace& work) {
  const index_t n = this->alike_ ? kv_.head(0).spec().kv_heads : 0;
  for (index_t i = 0; i < heads.count() && n > 0; i += n) {
    const index_t first = heads[i], length = kv_.head(first).length();
    bool all = this->is_due(first);
    for (index_t h = first; h < first + n; ++h) {
      all = all && kv_.head(h).length() == length;
    }
    if (all) {
      this->average(head_range{first, n}, true);
    }
    for (index_t h = first; h < first + n && all; ++h) {
      to_limit(h, work);
    }
  }
}

}  // namespace kvmeld::inline v0::detail
