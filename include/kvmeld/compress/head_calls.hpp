// SPDX-License-Identifier: MIT
/// What a compressor does with heads: measures and steps them, takes a step's attention from an
/// engine that computes its own, seals their first slots.
#pragma once

#include <algorithm>  // std::copy_n
#include <limits>     // std::numeric_limits
#include <vector>

#include "kvmeld/compress/compressor_base.hpp"
#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/executor.hpp"
#include "kvmeld/policies/declared.hpp"

namespace kvmeld::inline v0 {

/// One decode step's attention of the heads chosen, from an engine that computes its own.
struct step_attention {
  /// [heads, group, stride] of the softmax that includes the newest token; the first `length` of
  /// each row are read.
  std::span<const float> probabilities = {};
  index_t stride = 0;  ///< 0: the longest of the heads' lengths
  /// [heads, group] of the logits, a sink's among them, natural logarithm
  std::span<const float> log_sum_exp = {};
  any_span query = {};  ///< [heads, group, key_dim] rotated, the newest token's
};

namespace detail {

/// What `compressor` says of its calls is not said again here.
template <policy P>
class head_calls : protected compressor_base<P> {
 protected:
  using base = compressor_base<P>;
  using base::base;
  using base::kv_, base::of, base::by_policy, base::slots_of, base::seen;
  using typename base::lease, typename base::one_head, typename base::leaving;

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
  /// After a step: evicts where heads of a layer keep the same tokens, once all have made it, and
  /// where a pinned token was awaited.
  template <executor E>
  void evict_late(const head_selection& heads, lease& work, const E& run) {
    bool any = false;
    for (index_t i = 0; i < heads.count(); ++i) {
      any = any || of(heads[i]).due;
    }
    if (any) {
      this->gather("step", heads);
    }
    if (this->alike_ ? due_alike(heads) : any) {
      run(heads.count(), [&](index_t i, index_t worker) {
        if (of(heads[i]).due) {
          to_limit(heads[i], work[worker]);
        }
      });
    }
  }

  template <executor E>
  void observe(const head_selection& heads, const step_attention& in, const E& run) {
    heads.check("observe", kv_.heads());
    const index_t group = kv_.head(0).group(), dim = kv_.head(0).dim();
    index_t longest = 0;
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_nothing_open("observe", heads[i]);
      this->expect_left("observe", heads[i]);
      longest = std::max(longest, kv_.head(heads[i]).length());
    }
    const index_t stride = in.stride > 0 ? in.stride : longest;
    expects(stride >= longest, "observe: expected a stride of at least ", longest, ", got ",
            stride);
    const auto expect = [&](const char* what, const any_span& x, index_t each) {
      if (x.size() > 0) {
        expect_size("observe", what, x, {heads.count(), group, each});
      }
      return x.size() > 0;
    };
    const observation_needs given = {expect("probabilities", in.probabilities, stride),
                                     expect("log_sum_exp", in.log_sum_exp, 1),
                                     expect("query", in.query, dim)};
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_given("observe", heads[i], given);
      if (of(heads[i]).kept.count() > 0) {
        this->expect_given_sealed("observe", heads[i], given);
      }
      expects(kv_.head(heads[i]).next_position() > of(heads[i]).tokens,
              "observe: expected a token appended since the last call, got none in head ",
              heads[i]);
    }
    lease work(this->pool_, workers_of("observe", run));
    run(heads.count(), [&](index_t i, index_t worker) {
      const seen_head behind_seal = this->seen(heads[i]);
      const head_ref all = kv_.head(heads[i]);
      workspace& w = work[worker];
      const index_t n = all.length(), first = i * group, kept = of(heads[i]).kept.count();
      observation taken;
      if (given.probabilities) {
        for (index_t r = 0; r < group; ++r) {
          std::copy_n(in.probabilities.data() + as_size(first + r, stride), n,
                      w.attention.data() + as_size(r, n));
        }
        taken.probabilities = std::span(w.attention).first(as_size(group, n));
      }
      if (given.log_sum_exp) {
        taken.log_sum_exp = in.log_sum_exp.subspan(as_size(first), as_size(group));
      }
      if (kept > 0) {  // without the sinks' share only policies that need neither are here
        const bool whole = given.log_sum_exp || all.spec().sink_logits.empty();
        taken = given.probabilities && whole ? observed_behind(all, kept, w, taken.log_sum_exp)
                                             : observation();
      }
      if (given.query) {
        taken.query = in.query.floats(std::ptrdiff_t{first} * dim, group * dim, w.input.data());
      }
      by_policy(heads[i], [&](const auto& p) {
        kvmeld::observe(p, behind_seal.head(), of(heads[i]).state, w, taken);
      });
      this->leave(heads[i]);
    });
    this->count_tokens(heads);
  }

  void seal(index_t request, index_t tokens) {
    this->expect_between("seal", request);
    const std::vector<index_t> heads = this->heads_of("seal", request);
    std::vector<index_t> sealed;
    for (const index_t h : heads) {
      sealed.push_back(expect_seal(h, tokens));
    }
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const index_t h = heads[i];
      if (of(h).kept.sealed != sealed[i]) {
        const kept_slots kept{.sealed = sealed[i]};
        of(h).state.clear();
        hold_to(h, this->decode_limit(h, this->slots_of(h), kept), kept);
      }
    }
  }

  void pin(index_t request, index_t first, index_t count) {
    using span = typename base::token_span;
    const std::vector<index_t> heads = this->heads_of("pin", request);
    expects(first >= 0 && count >= 0 && count <= std::numeric_limits<index_t>::max() - first,
            "pin: expected tokens from 0 on, got ", count, " from ", first);
    this->expect_no_draft("pin", request);
    std::vector<span> all = this->pins_[as_size(request)], merged;
    all.push_back({first, first + count});
    std::ranges::sort(all, {}, &span::first);
    for (const span& t : all) {
      if (!merged.empty() && t.first <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, t.end);
      } else if (t.first < t.end) {
        merged.push_back(t);
      }
    }
    for (const index_t h : heads) {
      if (this->pins(h)) {
        expect_pins(h, first, merged);
      }
    }
    for (const index_t h : heads) {
      of(h).gathered = std::min(of(h).gathered, first);
    }
    this->pins_[as_size(request)] = std::move(merged);
  }
  /// Refused: pinned tokens `all` for which head `h` is too small, or its policy's; new ones that
  /// begin with token `first`, of which it may lack some.
  void expect_pins(index_t h, index_t first,
                   const std::vector<typename base::token_span>& all) const {
    const head_ref head = kv_.head(h);
    const one_head& one = of(h);
    this->expect_left("pin", h, one.held.begun());
    this->expect_given_sealed("pin", h);
    index_t sealed = 0;  // tokens
    for (index_t s = 0; s < one.kept.sealed; ++s) {
      sealed = std::max(sealed, head.position(s) + 1);
    }
    expects(first < sealed || first >= one.compressed, "pin: expected tokens from ", one.compressed,
            " on (earlier ones are compressed), got ", first, " in head ", h);
    std::int64_t pinned = 0;
    for (const auto& t : all) {
      pinned += std::max(t.end - std::max(t.first, sealed), index_t{0});
    }
    by_policy(h, [&](const auto& p) {
      expect_seals("pin: ", p);
      const std::int64_t most = slots_of(h) - declared(p).min_budget();
      expects(pinned <= most, "pin: expected at most ", std::max(most, std::int64_t{0}),
              " tokens in all (", slots_of(h), " slots of the budget, of which ", p.name(),
              " needs ", declared(p).min_budget(), "), got ", pinned);
    });
  }

  /// Marks the heads of the layers that are due after a step, and gives them their mean scores; is
  /// there any? One that has not made the step leaves its layer as it is.
  bool due_alike(const head_selection& heads);

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
    expects(sealed >= one.kept.sealed, "seal: expected at least the ", one.kept.sealed,
            " slots that are sealed already in head ", h, ", got ", sealed);
    if (sealed > one.kept.sealed) {
      expects(this->pins_[as_size(kv_.request_of(h))].empty(),
              "seal: expected tokens to be pinned after it, got some that are");
      by_policy(h, [](const auto& p) { expect_seals("seal: ", p); });
      expects(sealed % head.page_slots() == 0, "seal: expected whole pages of ", head.page_slots(),
              " slots, got ", sealed, " slots in head ", h);
      const index_t known = one.kept.sealed + one.state.length();
      expects(known <= sealed, "seal: expected tokens after the first ", tokens,
              " that were not measured yet, got ", known - sealed, " in head ", h);
      expect_room("seal", h, {.sealed = sealed}, one.limit);
      this->expect_given_sealed("seal", h);
    }
    return sealed;
  }
  /// Refused: a head without room for a budget and a token after its `kept` slots.
  void expect_room(const char* call, index_t h, const kept_slots& kept, const budget& limit) const {
    const std::int64_t least = this->least_capacity(h, limit, kept);
    expects(errc::no_capacity, least <= kv_.head(h).capacity(), call,
            ": expected a capacity of at least ", least,
            " slots (sealed, budget and the new token), got ", kv_.head(h).capacity());
  }

  /// Holds a head to `limit` from now on, with `kept` slots and no prompt begun.
  void hold_to(index_t h, const budget& limit, const kept_slots& kept, bool goes_on = false) {
    of(h).limit = limit;
    of(h).kept = kept;
    of(h).goes_on = goes_on;
    of(h).held.release();
    this->end_draft(h);
    this->leave(h);
    this->count_tokens(head_range{h, 1});
    this->give_back(h);
  }
};

// Not in the class: what is inline is compiled by every file, `extern template` or not.

template <policy P>
bool head_calls<P>::step_head(index_t h, const head_ref& head, workspace& work, const float* q,
                              const float* k, const float* v, float* out) {
  one_head& one = of(h);
  const leaving keeps{one, head};
  budget limit = one.limit.reached(head.length() + 1 - one.kept.count())
                     ? this->in_turn(h, one.limit, head.next_position() + 1)
                     : one.limit;
  one.due = this->awaits_pins(h);
  if (this->alike(h) || one.due) {
    limit.trigger = std::numeric_limits<index_t>::max();  // `evict_late` follows
  }
  return by_policy(h, [&](const auto& p) {
    return one.kept.count() == 0
               ? try_step(p, head, one.state, work, q, k, v, limit, out)
               : try_kept_step(p, head, one.kept, one.state, work, q, k, v, limit, out);
  });
}

template <policy P>
void head_calls<P>::measure(index_t h, index_t i, const queries& q) {
  const seen_head behind_seal = seen(h);
  one_head& one = of(h);
  by_policy(h, [&](const auto& p) {
    q.of_head(i, [&](auto own) {
      if (!this->is_whole(h)) {
        own.log_sum_exp = nullptr;  // the engine's attention was over other slots
      }
      observe_prompt(p, behind_seal.head(), one.state, one.held, own);
    });
  });
  this->leave(h);
}

template <policy P>
void head_calls<P>::to_limit(index_t h, workspace& work) {
  const head_ref head = kv_.head(h);
  one_head& one = of(h);
  if (one.held.begun()) {
    finish(h, slots_of(h) - one.kept.pinned, work);
  } else if (one.limit.reached(head.length() - one.kept.count())) {
    const leaving keeps{one, head};
    const seen_head behind_seal(head, one.kept);
    by_policy(h, [&](const auto& p) {
      kvmeld::compress(p, behind_seal.head(), one.state, work,
                       this->in_turn(h, one.limit, head.next_position()));
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
  one.limit = this->decode_limit(h, slots, one.kept);
  one.goes_on = one.goes_on || one.held.begun();
  one.held.release();
  this->leave(h);
  this->count_tokens(head_range{h, 1});
  by_seen([&](const auto& p, const head_ref& head) {
    declared(p).after_compress(head, one.state, slots);
  });
  this->give_back(h, one.limit.trigger_length());
}

template <policy P>
bool head_calls<P>::due_alike(const head_selection& heads) {
  const index_t n = kv_.head(0).spec().kv_heads;
  bool any = false;
  for (index_t i = 0; i < heads.count(); i += n) {
    // A layer that is cut may be in parts, whose heads evict by themselves.
    bool all = this->alike(heads[i]) && this->is_due(heads[i]);
    for (index_t k = i; k < std::min(i + n, heads.count()); ++k) {
      all = all && kv_.head(heads[k]).length() == kv_.head(heads[i]).length();
    }
    if (all) {
      this->average(head_range{heads[i], n}, true);
    }
    for (index_t k = i; k < std::min(i + n, heads.count()); ++k) {
      of(heads[k]).due = all;
    }
    any = any || all;
  }
  return any;
}

}  // namespace detail
}  // namespace kvmeld::inline v0
