// SPDX-License-Identifier: MIT
/// The one object that an engine holds: policies, budgets, states and scratch over a cache.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kvmeld/compress/requests.hpp"
#include "kvmeld/executor.hpp"

namespace kvmeld::inline v0 {

/// Compression of a cache's heads, `P` for each. Every call names heads by layer and request
/// (`kv.heads(layer, request)`).
///
///     kvmeld::compressor meld(kv, kvmeld::fold{}, kvmeld::budget::shared(64));
///     kv.append(kv.heads(layer, r), k, v, tokens);                   // a prompt, layer by layer
///     meld.prompt(kv.heads(layer, r), kvmeld::queries(q, tokens, spec));
///     meld.end_prompt(r);
///     meld.step(kv.heads(layer, active), {q, k, v}, out);            // a token of each request
///
/// Heads of a layer with a window are cut to it, which is exact: they keep the newest tokens, and
/// neither policy nor budget is asked. Without slots beyond the window in their capacity,
/// they hold every token that is appended.
///
/// Calls over heads of different requests may run at the same time. A refused call has changed
/// nothing, but for `errc::not_finite` of `step`: there the heads that it names are as they were,
/// and all others have made their step.
template <policy P>
class compressor : private detail::request_calls<P> {
  using base = detail::request_calls<P>;
  using base::kv_, base::of, base::by_policy;
  using typename base::lease, typename base::one_head;

 public:
  /// One policy and budget for all heads. `given`: what an engine with its own attention will hand
  /// to `observe`; left out, `step` computes attention. The cache must outlive the compressor.
  /// Refused: budgets that a policy cannot hold or the capacity has no room for, a policy without
  /// what it needs or scores to share by, or for other attention than a layer's (`unsupported`).
  template <kv_cache Cache>
  compressor(Cache& kv, P p, const budget& b, const observation_needs& given = {true, true, true})
      : base(kv, std::span<const P>(&p, 1), std::span<const budget>(&b, 1), given) {}

  /// A policy, a budget for each head of a request `[layers, kv_heads]`, or one for all: spans, or
  /// vectors of them. Shared budgets are one value.
  /// @{
  template <kv_cache Cache>
  compressor(Cache& kv, std::span<const P> policies, std::span<const budget> budgets,
             const observation_needs& given = {true, true, true})
      : base(kv, policies, budgets, given) {}
  template <kv_cache Cache>
  compressor(Cache& kv, P p, std::span<const budget> budgets,
             const observation_needs& given = {true, true, true})
      : base(kv, std::span<const P>(&p, 1), budgets, given) {}
  /// @}

  // --------------------------------------------------------------------------- a prompt

  /// Measures a prompt, or its next chunk, on its own queries; the rows were appended before. What
  /// the policy wants of the queries it takes, and keeps no more of them.
  /// Refused: heads that are not those of one layer and request, queries of another shape, more
  /// queries than tokens, NaN or Inf where the spec asks for it.
  template <executor E = serial>
  void prompt(const head_selection& heads, const queries& q, const E& run = {}) {
    this->expect_queries(heads, q);
    (void)detail::workers_of("prompt", run);
    if (q.tokens() == 0) {
      return;
    }
    run(heads.count(), [&](index_t i, index_t) { this->measure(heads[i], i, q); });
  }

  /// Appends `tokens` tokens of a layer's prompt and attends, for engines that leave that to
  /// kvmeld: `in [tokens, heads, ...]`, `out [tokens, heads, group, value_dim]`; each token sees
  /// itself and all before it. `prompt` measures them next. Refused, with nothing changed: what
  /// `append` refuses, heads of several requests, NaN or Inf (`not_finite`), a draft.
  void attend(const head_selection& heads, const step_input& in, std::span<float> out,
              index_t tokens) {
    base::attend(heads, in, out, tokens);
  }

  /// Ends a request's prompt: all of its heads are brought to their budgets. Heads that `compress`
  /// has brought there already stay as they are. Scratch of the prompt is given back.
  /// Where a model's heads are split over processes, a shared budget is divided as in one: each
  /// process calls with the `group`, whose `gather` is called once, and only if budgets are shared.
  /// Refused: a request that is not there, a policy that needs queries and was given none; with a
  /// group `budget::same_tokens` and `fold::leverage_exponent` (`unsupported`), messages that are
  /// not of the same layers.
  template <executor E = serial>
  void end_prompt(index_t request, const E& run = {}, const process_group& group = {}) {
    const std::vector<index_t> heads = this->heads_of("end_prompt", request);
    this->expect_no_draft("end_prompt", request);
    const index_t workers = detail::workers_of("end_prompt", run);
    this->gather("end_prompt", heads);
    const std::vector<index_t> slots = this->prompt_slots(heads, group);
    lease work(this->pool_, workers);
    run(kv_.per_request(), [&](index_t i, index_t worker) {
      this->finish(heads[as_size(i)], slots[as_size(i)], work[worker]);
    });
    this->count_pages(heads);
    this->pool_.release();
  }

  /// Brings the heads chosen that are at their trigger, or whose prompt has begun, to their
  /// budgets: after a layer's prompt where budgets are not shared, or after `observe`. `lengths
  /// [heads]`, if given: how many slots each now has.
  template <executor E = serial>
  void compress(const head_selection& heads, std::span<index_t> lengths = {}, const E& run = {}) {
    heads.check("compress", kv_.heads());
    const index_t workers = detail::workers_of("compress", run);
    expects(lengths.empty() || lengths.size() == as_size(heads.count()),
            "compress: expected lengths [", heads.count(), "], got ", lengths.size());
    expects(lengths.empty() || lengths.data() != nullptr, "compress: expected lengths, got null");
    this->gather("compress", heads);
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_compress(heads[i]);
    }
    this->expect_alike("compress", heads);
    this->average(heads, true);
    lease work(this->pool_, workers);
    run(heads.count(), [&](index_t i, index_t worker) {
      this->to_limit(heads[i], work[worker]);
      if (!lengths.empty()) {
        lengths[as_size(i)] = kv_.head(heads[i]).length();
      }
    });
    this->count_pages(heads);
  }

  // --------------------------------------------------------------------------- decode

  /// One token of the heads chosen: append, attend, observe, return to the budget. `in`: rows of
  /// the heads, in their order; `out [heads, group, value_dim]`. Refused: sizes that do not match,
  /// null, no room for the token, a prompt or draft that has not ended, other positions than
  /// the heads' (without `positions`: a token that the layer before has not, or for the first layer
  /// the last one), a policy that compresses
  /// prompts only; of heads that keep the same tokens others than whole layers, and a layer after
  /// its `not_finite`, until `clear`; `not_finite`: see above.
  template <executor E = serial>
  void step(const head_selection& heads, const step_input& in, std::span<float> out,
            const E& run = {}) {
    this->expect_rows("step", heads, in, out, 1);
    this->expect_tokens(heads, in);
    const index_t workers = detail::workers_of("step", run);
    const head_ref any = kv_.head(0);
    const index_t group = any.group(), dim = any.dim(), rows = group * dim, of_v = any.value_dim(),
                  own_v = any.own_value_dim();
    lease work(this->pool_, workers);
    run(heads.count(), [&](index_t i, index_t worker) {
      const index_t h = heads[i];
      float* const buffer = work[worker].input.data();
      const float* const q = in.q.floats(std::ptrdiff_t{i} * rows, rows, buffer);
      const float* const k = in.k.floats(std::ptrdiff_t{i} * dim, dim, buffer + rows);
      const float* const v = in.v.floats(std::ptrdiff_t{i} * own_v, own_v, buffer + rows + dim);
      float* const to = out.data() + std::ptrdiff_t{i} * group * of_v;
      of(h).not_finite = !this->step_head(h, kv_.head(h), work[worker], q, k, v, to);
      of(h).tokens = kv_.head(h).next_position();
    });
    this->evict_late(heads, work, run);
    this->expect_finite_steps("step", heads);
  }

  /// One token's attention from the engine's own kernels, after its row was appended. `compress`
  /// then brings heads to their budgets.
  /// Refused: other shapes than `step_attention` says, what the policy needs and did not get, no
  /// token appended since the last call, a prompt or draft that has not ended.
  template <executor E = serial>
  void observe(const head_selection& heads, const step_attention& in, const E& run = {}) {
    base::observe(heads, in, run);
  }

  // --------------------------------------------------------------------------- drafts

  /// `tokens` drafted tokens of one request's heads in a layer, `[tokens, heads, ...]` in `in`,
  /// `out [tokens, heads, group, value_dim]`: each attends to those drafted before it and to all
  /// that the head holds, of which a step would have evicted some for tokens after the first
  /// `draft_room`. The heads stay as they were until `accept`, and the request's other calls are
  /// refused, `append` to its heads too.
  /// Refused: no room for all of them, a prompt that has not ended, a draft of these heads, other
  /// tokens than the layer before has, NaN or Inf (`not_finite`).
  void draft(const head_selection& heads, const step_input& in, std::span<float> out,
             index_t tokens) {
    base::draft(heads, in, out, tokens);
  }

  /// How many drafted tokens attend to just what they would as steps: up to the first with which a
  /// head of the request is compressed, which at its budget is the first one; no more than the
  /// cache has free slots for. A `trigger` or `slack` makes room.
  /// Refused: a request that is not there, a prompt or draft in between.
  index_t draft_room(index_t request) const { return base::draft_room(request); }

  /// The first `tokens` drafted of each layer count, as so many steps would, to the bit; the others
  /// were never there. 0: none does. Refused: more than were drafted, or than some layer has a
  /// draft of. Where a step's output is not finite (`not_finite`), the head lacks its tokens from
  /// there on.
  void accept(index_t request, index_t tokens) { base::accept(request, tokens); }

  // --------------------------------------------------------------------------- requests

  /// Seals the slots of a request's first `tokens` tokens: a prefix, compressed or not, that page
  /// tables of several requests may share. No call changes these slots until `clear`, or a `copy`
  /// or `load` into the request; `copy`, `save` and `load` take the seal along. Attention is over
  /// all slots. To the policy those after the seal are a head of its own, without sinks: budgets
  /// count these alone, scores are of the attention within them, and the state starts anew.
  /// Refused: more tokens than were appended; slots that do not lie before all others, as once
  /// steps have evicted; fewer than are sealed; a page in part; later tokens that were measured
  /// already; a budget without room after the seal (`no_capacity`); `ems` and whatever moves the
  /// first slots
  /// (`unsupported`); a prompt or draft in between.
  void seal(index_t request, index_t tokens) { base::seal(request, tokens); }

  /// Pins `count` tokens of a request from token `first` on, as a system prompt, tools, or the
  /// question: no policy evicts or merges them, and their rows stay as they are, in every head
  /// whose layer has no window. Before they are appended, or before they are compressed: of a
  /// prompt until `end_prompt`. `clear` lifts it; `copy`, `save` and `load` take it along. The
  /// budget counts them, and they lie before all slots but the sealed ones; to the policy the
  /// others are the head, as after a seal. Refused, with nothing changed: tokens that are
  /// compressed, more than the budget has slots for beyond the policy's least, a draft in between;
  /// `ems` and whatever moves the first slots
  /// (`unsupported`).
  void pin(index_t request, index_t first, index_t count) { base::pin(request, first, count); }

  /// Empties a request's heads and states, and lifts its seal and pins: the next token is at
  /// position 0.
  void clear(index_t request) { base::clear(request); }

  /// Makes request `to` what request `from` is, as for a beam or a prompt asked several times.
  /// Refused: requests that are not there, a prompt or draft in between.
  void copy(index_t from, index_t to) { base::copy(*this, from, to); }
  /// The same of a request of another compressor, over a cache of another storage, capacity or
  /// layout: rows, states, seal, and what the heads are held to (as a shared budget was divided).
  /// In another storage every row is rounded once. The other keeps its request: `clear` it there.
  /// Refused, with nothing changed: another model or policy, too few slots for what the heads hold
  /// and are held to (`no_capacity`), pages that are not there or shared, sealed slots in part of a
  /// page, `ems` in another capacity.
  void copy(const compressor& other, index_t from, index_t to) { base::copy(other, from, to); }

  /// Saves a request: rows, states, and what its heads are held to. Policies and budgets are the
  /// program's. Several may follow one another in a (binary) stream.
  /// Refused: a request that is not there, a prompt or draft in between, a stream that fails.
  void save(std::ostream& out, index_t request) { base::save(out, request); }
  /// Loads what `save` saved into a request of the same shape, policies and storage; decoding goes
  /// on bit for bit. Refused, with nothing changed: anything else, an end too early, another
  /// checksum (`corrupt_file`).
  void load(std::istream& in, index_t request) { base::load(in, request); }

  /// As `kv.shrink(meld, capacity)`: `capacity` slots a head from here on. Refused, with nothing
  /// changed: another cache, more slots than there are, fewer than a head or its budget needs
  /// (`no_capacity`), a prompt or draft in between.
  void shrink(kv_cache auto& kv, index_t capacity) { base::shrink(kv, capacity); }

  // --------------------------------------------------------------------------- what it holds

  /// The policy of a head of the cache. Refused: a head that is not there.
  const P& policy_of(index_t head) const {
    this->expect_head("policy_of", head);
    return base::policy_of(head);
  }
  /// What the policy remembers of a head of the cache. Refused: a head that is not there.
  const head_state& state(index_t head) const {
    this->expect_head("state", head);
    return of(head).state;
  }
  /// Takes the state of a head that was measured and compressed by the functions of one head, as
  /// where several budgets share what a prompt was measured as. The cache has its rows. Where heads
  /// share a budget, this one is held to the slots that it has, as its part.
  /// Refused: a head that is not there, a state of another kind, one for fewer slots, one of more
  /// slots than the head has after its seal.
  void set_state(index_t head, head_state state) {
    this->expect_head("set_state", head);
    this->expect_nothing_open("set_state", head);
    by_policy(head, [&](const auto& p) { detail::expect_state(p, kv_.head(head), state); });
    expects(state.capacity() >= kv_.head(head).capacity(), "set_state: expected a state for ",
            kv_.head(head).capacity(), " slots, got one for ", state.capacity());
    const index_t slots = kv_.head(head).length() - of(head).kept.count();
    expects(state.length() <= slots, "set_state: expected a state of at most ", slots,
            " slots, got one of ", state.length());
    if (this->shares(head)) {
      of(head).limit = this->decode_limit(head, slots, of(head).kept);
    }
    of(head).state = std::move(state);
    this->leave(head);
    this->count_tokens(head_range{head, 1});
  }
  /// How many slots of a head are sealed. Refused: a head that is not there.
  index_t sealed(index_t head) const {
    this->expect_head("sealed", head);
    return of(head).kept.sealed;
  }
  /// How many slots of a head after the sealed ones hold pinned tokens. Refused: a head that is not
  /// there.
  index_t pinned(index_t head) const {
    this->expect_head("pinned", head);
    return of(head).kept.pinned;
  }
  /// What a head is held to while decoding, without its sealed and pinned slots. Refused: a head
  /// that is not there.
  const budget& limit(index_t head) const {
    this->expect_head("limit", head);
    return of(head).limit;
  }
  /// Bytes that the states of the slots in use take.
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const one_head& one : this->heads_) {
      sum += one.state.bytes();
    }
    return sum;
  }
  /// Bytes that the states of all heads and what is kept of prompts' queries hold at present, in
  /// use or not. The scratch of workers is not counted.
  std::size_t reserved_bytes() const {
    std::size_t sum = 0;
    for (const one_head& one : this->heads_) {
      sum += one.state.reserved_bytes() + one.held.bytes();
    }
    return sum;
  }
};

/// One policy for all heads.
template <kv_cache Cache, policy P>
compressor(Cache&, P, const budget&, const observation_needs& = {}) -> compressor<P>;
/// One for each head.
template <kv_cache Cache, class Policies>
compressor(Cache&, const Policies&, std::span<const budget>, const observation_needs& = {})
    -> compressor<detail::element_of<const Policies>>;

}  // namespace kvmeld::inline v0
