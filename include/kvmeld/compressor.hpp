// SPDX-License-Identifier: MIT
/// The one object that an engine holds: policies, budgets, states and scratch over a cache.
#pragma once

#include <span>
#include <vector>

#include "kvmeld/compress/shrinking.hpp"
#include "kvmeld/executor.hpp"
#include "kvmeld/queries.hpp"

namespace kvmeld::inline v0 {

/// One decode step's attention of the heads chosen, from an engine that computes its own.
struct step_attention {
  /// [heads, group, stride] of the softmax that includes the newest token; the first `length` of
  /// each row are read.
  std::span<const float> probabilities = {};
  index_t stride = 0;                       ///< 0: the longest of the heads' lengths
  std::span<const float> log_sum_exp = {};  ///< [heads, group] of the logits, natural logarithm
  any_span query = {};                      ///< [heads, group, key_dim] rotated, the newest token's
};

/// Compression of a cache's heads, `P` for each. Every call names heads by layer and request
/// (`kv.heads(layer, request)`).
///
///     kvmeld::compressor meld(kv, kvmeld::fold{}, kvmeld::budget::shared(64));
///     kv.append(kv.heads(layer, r), k, v, tokens);                   // a prompt, layer by layer
///     meld.prompt(kv.heads(layer, r), kvmeld::queries(q, tokens, spec));
///     meld.end_prompt(r);
///     meld.step(kv.heads(layer, active), {q, k, v}, out);            // a token of each request
///
/// Calls over heads of different requests may run at the same time. A refused call has changed
/// nothing, but for `errc::not_finite` of `step`: there the heads that it names are as they were,
/// and all others have made their step.
template <policy P>
class compressor : private detail::shrinking<P> {
  using base = detail::shrinking<P>;
  using base::at, base::budget_of, base::kv_, base::held_, base::limits_, base::states_;
  using typename base::lease;

 public:
  /// One policy and budget for all heads. `given`: what an engine with its own attention will hand
  /// to `observe`; left out, `step` computes attention. The cache must outlive the compressor.
  /// Refused: budgets that a policy cannot hold or the capacity has no room for, a policy that
  /// needs what is not given, shared budgets of a policy without scores.
  template <kv_cache Cache>
  compressor(Cache& kv, P p, const budget& b, const observation_needs& given = {true, true, true})
      : compressor(kv, std::span<const P>(&p, 1), std::span<const budget>(&b, 1), given) {}

  /// A policy, a budget for each head of a request `[layers, kv_heads]`, or one for all. Shared
  /// budgets are one value.
  template <kv_cache Cache>
  compressor(Cache& kv, std::span<const P> policies, std::span<const budget> budgets,
             const observation_needs& given = {true, true, true})
      : base(kv, policies, budgets, given) {}

  // --------------------------------------------------------------------------- a prompt

  /// Measures a prompt, or its next chunk, on its own queries; the rows were appended before. What
  /// the policy wants of the queries it takes, and keeps no more of them.
  /// Refused: heads that are not those of one layer and request, queries of another shape, more
  /// queries than tokens, NaN or Inf where the spec asks for it.
  template <executor E = serial>
  void prompt(const head_selection& heads, const queries& q, const E& run = {}) {
    this->expect_heads("prompt", heads);
    expects(heads.count() == q.kv_heads(), "prompt: expected queries of ", heads.count(),
            " KV heads, got ", q.kv_heads());
    for (index_t i = 0; i < heads.count(); ++i) {
      const head_ref head = kv_.head(heads[i]);
      expects(head.group() == q.group() && head.dim() == q.dim(), "prompt: expected queries of [",
              head.group(), ", ", head.dim(), "] per KV head, got [", q.group(), ", ", q.dim(),
              "]");
      expects(q.tokens() <= head.next_position(), "prompt: expected at most ", head.next_position(),
              " queries (the tokens appended), got ", q.tokens());
      if (head.check_finite()) {
        expect_finite("prompt: queries", q.rows());
      }
    }
    if (q.tokens() == 0) {
      return;
    }
    run(heads.count(), [&](index_t i, index_t) {
      const index_t h = heads[i];
      const head_ref head = kv_.head(h);
      const prompt_use use = traits::prompt_use_of(policy_of(h));
      detail::held_queries& held = held_[at(h)];
      q.of_head(i, [&](const auto& own) {
        if (use.observes) {
          held.with_earlier(own, head.group(), head.dim(), use, [&](const auto& view) {
            kvmeld::observe(policy_of(h), head, states_[at(h)], view);
          });
        } else {
          states_[at(h)].extend(head.length());
        }
        held.keep(own, head.next_position() - q.tokens(), head.group(), head.dim(), use);
      });
    });
  }

  /// Ends a request's prompt: all of its heads are brought to their budgets. Heads that `compress`
  /// has brought there already stay as they are. Scratch of the prompt is given back.
  /// Refused: a request that is not there, a policy that needs queries which did not come.
  template <executor E = serial>
  void end_prompt(index_t request, const E& run = {}) {
    this->expect_request("end_prompt", request);
    std::vector<index_t> heads;
    heads.reserve(at(kv_.per_request()));
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      heads.push_back(kv_.of_request(request, i));
    }
    const bool is_shared = this->budgets_.front().is_shared;
    const std::vector<index_t> slots = is_shared ? this->divided(heads) : std::vector<index_t>();
    for (std::size_t i = 0; i < heads.size(); ++i) {
      this->expect_prompt(heads[i], is_shared ? slots[i] : budget_of(heads[i]).slots);
    }
    lease work(this->pool_, run.workers());
    run(static_cast<index_t>(heads.size()), [&](index_t i, index_t worker) {
      const index_t h = heads[static_cast<std::size_t>(i)];
      this->finish(h, is_shared ? slots[static_cast<std::size_t>(i)] : budget_of(h).slots,
                   work[worker]);
    });
    this->pool_.release();
  }

  /// Brings the heads chosen that are at their trigger, or whose prompt has come, to their budgets:
  /// after a layer's prompt where budgets are not shared, or after `observe`. `lengths [heads]`, if
  /// given: how many slots each now has.
  template <executor E = serial>
  void compress(const head_selection& heads, std::span<index_t> lengths = {}, const E& run = {}) {
    this->expect_heads("compress", heads);
    expects(lengths.empty() || lengths.size() == static_cast<std::size_t>(heads.count()),
            "compress: expected lengths [", heads.count(), "], got ", lengths.size());
    for (index_t i = 0; i < heads.count(); ++i) {
      const index_t h = heads[i];
      expects(
          !held_[at(h)].begun() || !budget_of(h).is_shared,
          "compress: expected end_prompt first (budgets are shared by all layers), got a prompt "
          "that has not ended");
      this->expect_prompt(h, held_[at(h)].begun() ? budget_of(h).slots : limits_[at(h)].slots);
    }
    lease work(this->pool_, run.workers());
    run(heads.count(), [&](index_t i, index_t worker) {
      const index_t h = heads[i];
      if (held_[at(h)].begun()) {
        this->finish(h, budget_of(h).slots, work[worker]);
      } else if (limits_[at(h)].reached(kv_.head(h).length())) {
        kvmeld::compress(policy_of(h), kv_.head(h), states_[at(h)], work[worker], limits_[at(h)]);
      }
      if (!lengths.empty()) {
        lengths[static_cast<std::size_t>(i)] = kv_.head(h).length();
      }
    });
  }

  // --------------------------------------------------------------------------- decode

  /// One token of the heads chosen: append, attend, observe, return to the budget. `in`: rows of
  /// the heads, in their order; `out [heads, group, value_dim]`. Refused: sizes that do not match,
  /// null, no room for the token, a prompt that has not ended, a policy that compresses prompts
  /// only; `not_finite`: see above.
  template <executor E = serial>
  void step(const head_selection& heads, const step_input& in, std::span<float> out,
            const E& run = {}) {
    this->expect_heads("step", heads);
    this->expect_rows("step", heads, in, out, 1);
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_step(heads[i]);
    }
    this->step_rows(heads, in, out, run);
  }

  /// One token's attention from the engine's own kernels, after its row was appended. `compress`
  /// then brings heads to their budgets.
  /// Refused: other shapes than `step_attention` says, what the policy needs and did not get.
  template <executor E = serial>
  void observe(const head_selection& heads, const step_attention& in, const E& run = {}) {
    this->expect_heads("observe", heads);
    const head_ref any = kv_.head(0);
    const index_t group = any.group(), dim = any.dim();
    index_t longest = 0;
    for (index_t i = 0; i < heads.count(); ++i) {
      longest = std::max(longest, kv_.head(heads[i]).length());
    }
    const index_t stride = in.stride > 0 ? in.stride : longest;
    expects(stride >= longest, "observe: expected a stride of at least ", longest, ", got ",
            stride);
    const auto rows = static_cast<std::size_t>(heads.count()) * static_cast<std::size_t>(group);
    const auto expect = [&](const char* what, std::size_t size, std::size_t wanted) {
      expects(size == 0 || size == wanted, "observe: expected ", what, " (", wanted,
              " numbers) or none, got ", size);
    };
    expect("probabilities [heads, group, stride]", in.probabilities.size(),
           rows * static_cast<std::size_t>(stride));
    expect("log_sum_exp [heads, group]", in.log_sum_exp.size(), rows);
    expect("query [heads, group, key_dim]", in.query.size(), rows * static_cast<std::size_t>(dim));
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_given("observe", policy_of(heads[i]),
                         {!in.probabilities.empty(), !in.log_sum_exp.empty(), in.query.size() > 0});
    }
    lease work(this->pool_, run.workers());
    run(heads.count(), [&](index_t i, index_t worker) {
      const head_ref head = kv_.head(heads[i]);
      workspace& w = work[worker];
      const auto n = static_cast<std::size_t>(head.length()), g = static_cast<std::size_t>(group),
                 first = static_cast<std::size_t>(i) * g;
      observation seen;
      if (!in.probabilities.empty()) {
        for (std::size_t r = 0; r < g; ++r) {
          std::copy_n(in.probabilities.data() + (first + r) * static_cast<std::size_t>(stride), n,
                      w.attention.data() + r * n);
        }
        seen.probabilities = std::span(w.attention).first(g * n);
      }
      seen.log_sum_exp = in.log_sum_exp.empty() ? in.log_sum_exp : in.log_sum_exp.subspan(first, g);
      if (in.query.size() > 0) {
        seen.query =
            in.query.floats(static_cast<std::ptrdiff_t>(first) * dim, group * dim, w.input.data());
      }
      kvmeld::observe(policy_of(heads[i]), head, states_[at(heads[i])], w, seen);
    });
  }

  // --------------------------------------------------------------------------- drafts

  /// `tokens` drafted tokens of one request's heads in a layer, `[tokens, heads, ...]` in `in`,
  /// `out [tokens, heads, group, value_dim]`: each sees those drafted before it and everything that
  /// the head holds. The heads stay as they were until `accept`.
  /// Refused: no room for all of them, a draft of these heads that was not accepted yet.
  void draft(const head_selection& heads, const step_input& in, std::span<float> out,
             index_t tokens) {
    this->draft_rows(heads, in, out, tokens);
  }

  /// The first `tokens` drafted of each layer count, as so many steps would, to the bit; the others
  /// were never there. 0: none does. Refused: more than were drafted.
  void accept(index_t request, index_t tokens) { this->accept_rows(request, tokens); }

  // --------------------------------------------------------------------------- requests

  /// Empties a request's heads and states: the next token is at position 0.
  void clear(index_t request) {
    this->expect_request("clear", request);
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      const index_t h = kv_.of_request(request, i);
      kvmeld::clear(kv_.head(h), states_[at(h)]);
      limits_[at(h)] = this->decode_limit(h, budget_of(h).slots);
      held_[at(h)].release();
    }
    this->drafts_[at(request)].clear();
  }

  /// Makes request `to` what request `from` is, as for a beam or a prompt asked several times.
  /// Refused: requests that are not there, a prompt or draft in between.
  void copy(index_t from, index_t to) {
    this->expect_request("copy", from), this->expect_request("copy", to);
    this->expect_between("copy", from);
    if (from == to) {
      return;
    }
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      const index_t a = kv_.of_request(from, i), b = kv_.of_request(to, i);
      kv_.head(b).expect_pages(0, kv_.head(a).length());
    }
    for (index_t i = 0; i < kv_.per_request(); ++i) {
      const index_t a = kv_.of_request(from, i), b = kv_.of_request(to, i);
      kvmeld::copy(kv_.head(a), states_[at(a)], kv_.head(b), states_[at(b)]);
      limits_[at(b)] = limits_[at(a)];
      held_[at(b)].release();
    }
    this->drafts_[at(to)].clear();
  }

  /// Saves a request: rows, states, and what its heads are held to. Policies and budgets are the
  /// program's. Several may follow one another in a (binary) stream.
  /// Refused: a request that is not there, a prompt or draft in between, a stream that fails.
  void save(std::ostream& out, index_t request) {
    this->expect_request("save", request);
    this->expect_between("save", request);
    this->save_request(out, request);
  }
  /// Loads what `save` saved into a request of the same shape, policies and storage; decoding goes
  /// on bit for bit. Refused, with nothing changed: anything else, an end too early, another
  /// checksum (`corrupt_file`).
  void load(std::istream& in, index_t request) {
    this->expect_request("load", request);
    this->load_request(in, request);
  }

  /// Gives memory back, as `kv.shrink(meld, capacity)`: `capacity` slots a head from here on, of
  /// the cache and of the states. Old and new memory are held together while rows move; views of
  /// heads are invalid afterwards. A policy's own memory keeps its size. Refused, with nothing
  /// changed: another cache, more slots than there are, fewer than a head or its budget needs
  /// (`no_capacity`), a prompt or draft in between.
  void shrink(kv_cache auto& kv, index_t capacity) { this->shrink_all(kv, capacity); }

  // --------------------------------------------------------------------------- what it holds

  /// The policy of a head of the cache.
  using base::policy_of;
  /// What the policy remembers of a head of the cache.
  const head_state& state(index_t head) const { return states_[at(head)]; }
  /// Takes the state of a head that was measured and compressed by the functions of one head, as
  /// where several budgets share what a prompt was measured as. The cache has its rows.
  /// Refused: a head that is not there, a state of another kind, one for fewer slots.
  void set_state(index_t head, head_state state) {
    expects(head >= 0 && at(head) < states_.size(), "set_state: expected a head from 0 to ",
            states_.size() - 1, ", got ", head);
    const head_ref rows = kv_.head(head);
    detail::expect_state(policy_of(head), rows, state);
    states_[at(head)] = std::move(state);
  }
  /// What a head is held to while decoding.
  const budget& limit(index_t head) const { return limits_[at(head)]; }
  /// Bytes that the states of the slots in use take.
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const head_state& s : states_) {
      sum += s.bytes();
    }
    return sum;
  }
};

/// One policy and budget for all heads.
template <kv_cache Cache, policy P>
compressor(Cache&, P, const budget&) -> compressor<P>;
/// The same for an engine with its own attention.
template <kv_cache Cache, policy P>
compressor(Cache&, P, const budget&, const observation_needs&) -> compressor<P>;

}  // namespace kvmeld::inline v0
