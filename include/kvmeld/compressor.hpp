// SPDX-License-Identifier: MIT
/// The one object that an engine holds: policies, budgets, states and scratch over a cache.
#pragma once

#include <algorithm>  // std::copy_n, std::max
#include <deque>
#include <limits>  // std::numeric_limits
#include <span>
#include <utility>  // std::move
#include <vector>

#include "kvmeld/compress/drafts.hpp"
#include "kvmeld/compress/open_heads.hpp"
#include "kvmeld/compress/saved_heads.hpp"
#include "kvmeld/executor.hpp"

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
class compressor {
  using open = detail::open;

 public:
  /// One policy and budget for all heads. `given`: what an engine with its own attention will hand
  /// to `observe`; left out, `step` computes attention. The cache must outlive the compressor.
  /// Refused: budgets that a policy cannot hold or the capacity has no room for, or parts of them
  /// that have no effect (slack with a trigger, a cap that is not shared), a policy without
  /// what it needs or scores to share by, or for other attention than a layer's (`unsupported`).
  template <kv_cache Cache>
  compressor(Cache& kv, P p, const budget& b, const observation_needs& given = {true, true, true})
      : compressor(kv, std::span<const P>(&p, 1), std::span<const budget>(&b, 1), given) {}

  /// A policy, a budget for each head of a request `[layers, kv_heads]`, or one for all: spans, or
  /// vectors of them. Shared budgets are one value.
  /// @{
  template <kv_cache Cache>
  compressor(Cache& kv, std::span<const P> policies, std::span<const budget> budgets,
             const observation_needs& given = {true, true, true})
      : open_(detail::cache_ref(kv), policies, budgets, given),
        pool_(kv.head(0).group(), kv.head(0).row_dim(), kv.head(0).capacity()) {}
  template <kv_cache Cache>
  compressor(Cache& kv, P p, std::span<const budget> budgets,
             const observation_needs& given = {true, true, true})
      : compressor(kv, std::span<const P>(&p, 1), budgets, given) {}
  /// @}

  // --------------------------------------------------------------------------- a prompt

  /// Measures a prompt, or its next chunk, on its own queries; the rows were appended before. What
  /// the policy wants of the queries it takes, and keeps no more of them.
  /// Refused: heads that are not those of one layer and request, queries of another shape, more
  /// queries than tokens that are not measured yet, NaN or Inf where the spec asks for it.
  template <executor E = serial>
  void prompt(const head_selection& heads, const queries& q, const E& run = {}) {
    (void)detail::workers_of("prompt", run);
    expect_queries(heads, q);
    if (q.tokens() > 0) {
      run(heads.count(), [&](index_t i, index_t) { open_.measure(heads[i], i, q); });
      for (const index_t h : heads) {  // not before: where a policy throws, all are measured anew
        open_.of(h).measured = open_.of(h).state.length();
      }
    }
  }

  /// Appends `tokens` tokens of a layer's prompt and attends, for engines that leave that to
  /// kvmeld: `in [tokens, heads, ...]`, `out [tokens, heads, group, value_dim]`; each token sees
  /// itself and all before it. `prompt` measures them next. Refused, with nothing changed: what
  /// `append` refuses, heads of several requests, NaN or Inf (`not_finite`), a draft.
  void attend(const head_selection& heads, const step_input& in, std::span<float> out,
              index_t tokens) {
    (void)detail::attended(open_, "attend", heads, in, out, tokens, true);
  }

  /// Ends a request's prompt: all of its heads are brought to their budgets. Heads that `compress`
  /// has brought there already stay as they are. Scratch of the prompt is given back.
  /// Where a model's heads are split over processes, a shared budget is divided as in one: each
  /// process calls with the `group`, whose `gather` is called once, and only if budgets are shared.
  /// Refused: a request that is not there, heads without equally many tokens, a policy that needs
  /// queries and was given none, or whose state rests; with a group `budget::same_tokens`
  /// (`unsupported`), messages that are not of the same layers.
  template <executor E = serial>
  void end_prompt(index_t request, const E& run = {}, const process_group& group = {}) {
    const std::vector<index_t> heads = open_.of_request("end_prompt", request);
    open_.admit("end_prompt", heads, open::last_of_prompt);
    open_.expect_equal_tokens("end_prompt", heads);
    const index_t workers = detail::workers_of("end_prompt", run);
    open_.gather("end_prompt", heads);
    const std::vector<index_t> slots = prompt_slots(heads, group);
    {
      lease work(pool_, workers);
      run(static_cast<index_t>(heads.size()), [&](index_t i, index_t worker) {
        open_.finish(heads[as_size(i)], slots[as_size(i)], work[worker]);
      });
    }
    pool_.release();
    const lease of_steps(pool_, workers);  // made here: a step that plans nothing allocates nothing
    open_.count_pages(heads);
  }

  /// Brings the heads chosen that are at their trigger, or whose prompt has begun, to their
  /// budgets: after a layer's prompt where budgets are not shared, or after `observe`. `lengths
  /// [heads]`, if given: how many slots each now has.
  template <executor E = serial>
  void compress(const head_selection& heads, std::span<index_t> lengths = {}, const E& run = {}) {
    heads.check("compress", open_.kv.heads());
    lease work(pool_, detail::workers_of("compress", run));
    expects(lengths.empty() || lengths.size() == as_size(heads.count()),
            "compress: expected lengths [", heads.count(), "], got ", lengths.size());
    expects(lengths.empty() || lengths.data() != nullptr, "compress: expected lengths, got null");
    open_.admit("compress", heads, open::last_of_prompt);
    open_.gather("compress", heads);
    for (const index_t h : heads) {
      const bool begun = open_.of(h).held.begun();
      expects(!begun || !open_.policies.shares(h),
              "compress: expected end_prompt first (budgets are shared by all layers), got a "
              "prompt that has not ended");
      open_.expect_prompt("compress", h, begun ? budget{open_.slots_of(h)} : open_.of(h).limit);
    }
    open_.expect_alike("compress", heads);
    open_.average(heads, true);
    run(heads.count(), [&](index_t i, index_t worker) {
      open_.to_limit(heads[i], work[worker]);
      if (!lengths.empty()) {
        lengths[as_size(i)] = open_.kv.head(heads[i]).length();
      }
    });
    open_.count_pages(heads);
    open_.divide_again(heads);
  }

  // --------------------------------------------------------------------------- decode

  /// One token of the heads chosen: append, attend, observe, return to the budget. `in`: rows of
  /// the heads, in their order; `out [heads, group, value_dim]`. Refused: sizes that do not match,
  /// null, no room for the token, a prompt or draft that has not ended, other positions than the
  /// heads' (without `positions`: a token that the layer before has not, or for the first layer the
  /// last one), a policy that compresses prompts only; of heads that keep the same tokens others
  /// than whole layers, and a layer after its `not_finite`, until `clear`; `not_finite`: see above.
  template <executor E = serial>
  void step(const head_selection& heads, const step_input& in, std::span<float> out,
            const E& run = {}) {
    expect_step(heads, in, out);
    lease work(pool_, detail::workers_of("step", run));
    const head_ref any = open_.kv.head(0);
    const index_t group = any.group(), dim = any.dim(), rows = group * dim, of_v = any.value_dim(),
                  own_v = any.own_value_dim();
    run(heads.count(), [&](index_t i, index_t worker) {
      const index_t h = heads[i];
      float* const buffer = work[worker].input.data();
      const float* const q = in.q.floats(std::ptrdiff_t{i} * rows, rows, buffer);
      const float* const k = in.k.floats(std::ptrdiff_t{i} * dim, dim, buffer + rows);
      const float* const v = in.v.floats(std::ptrdiff_t{i} * own_v, own_v, buffer + rows + dim);
      float* const to = out.data() + std::ptrdiff_t{i} * group * of_v;
      open_.of(h).not_finite = !open_.step(h, work[worker], q, k, v, to);
      open_.count_measured(h);
    });
    open_.evict_late(heads, work, run);
    open_.divide_again(heads);
    open_.expect_finite_steps("step", heads);
  }

  /// One token's attention from the engine's own kernels, after its row was appended. `compress`
  /// then brings heads to their budgets.
  /// Refused: other shapes than `step_attention` says, what the policy needs and did not get, no
  /// token appended since the last call, a prompt or draft that has not ended.
  template <executor E = serial>
  void observe(const head_selection& heads, const step_attention& in, const E& run = {}) {
    step_attention seen = in;
    const observation_needs given = expect_observed(heads, seen);
    lease work(pool_, detail::workers_of("observe", run));
    run(heads.count(),
        [&](index_t i, index_t worker) { observe_head(heads[i], i, seen, given, work[worker]); });
    for (const index_t h : heads) {  // not before: where a policy throws, all are observed anew
      open_.count_measured(h);
    }
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
    auto rows = detail::attended(open_, "draft", heads, in, out, tokens, false);
    for (index_t i = 0; i < heads.count(); ++i) {
      open_.begin_draft(heads[i], std::move(rows[as_size(i)]));
    }
  }

  /// How many drafted tokens attend to just what they would as steps: up to the first with which a
  /// head of the request is compressed, which at its budget is the first one; no more than the
  /// cache has free slots for. A `trigger` or `slack` makes room.
  /// Refused: a request that is not there, a prompt or draft in between.
  index_t draft_room(index_t request) const { return detail::draft_room(open_, request); }

  /// The first `tokens` drafted of each layer count, as so many steps would, to the bit; the others
  /// were never there. 0: none does. Refused: more than were drafted, or than some layer has a
  /// draft of. Where a step's output is not finite (`not_finite`), the head lacks its tokens from
  /// there on.
  void accept(index_t request, index_t tokens) { detail::accept(open_, request, tokens, pool_); }

  // --------------------------------------------------------------------------- requests

  /// Seals the slots of a request's first `tokens` tokens: a prefix, compressed or not, that page
  /// tables of several requests may share. No call changes these slots until `clear`, or a `copy`
  /// or `load` into the request, but that newest rows are rounded; `copy`, `save` and `load` take
  /// the seal along. Attention is over all slots. To the policy those after the seal are a head of
  /// its own, without sinks: budgets count these alone, scores are of the attention within them,
  /// and the state starts anew. Refused: more tokens than were appended; slots that do not lie
  /// before all others, as once steps have evicted; fewer than are sealed; a page in part; later
  /// tokens that were measured already; a budget without room after the seal (`no_capacity`); `ems`
  /// and whatever moves the first slots (`unsupported`); a prompt or draft in between.
  void seal(index_t request, index_t tokens);

  /// Pins `count` tokens of a request from token `first` on, as a system prompt, tools, or the
  /// question: no policy evicts or merges them (newest rows are rounded as others are), in every
  /// head whose layer has no window. Before they are appended, or before they are compressed: of a
  /// prompt until `end_prompt`. `clear` lifts it; `copy`, `save` and `load` take it along. The
  /// budget counts them, and they lie before all slots but the sealed ones; to the policy the
  /// others are the head, as after a seal.
  /// Refused, with nothing changed: tokens that are compressed, more than the budget has slots for
  /// beyond the policy's least, a draft in between; `ems` and whatever moves the first slots
  /// (`unsupported`).
  void pin(index_t request, index_t first, index_t count);

  /// Empties a request's heads and states, and lifts its seal and pins: the next token is at
  /// position 0.
  void clear(index_t request);

  /// Makes request `to` what request `from` is, as for a beam or a prompt asked several times.
  /// Refused: requests that are not there, a prompt or draft in between.
  void copy(index_t from, index_t to) { copy(*this, from, to); }
  /// The same of a request of another compressor, over a cache of another storage, capacity or
  /// layout: rows, states, seal, and what the heads are held to (as a shared budget was divided).
  /// In another storage every row is rounded once. The other keeps its request: `clear` it there.
  /// Refused, with nothing changed: another model or policy, too few slots for what the heads hold
  /// and are held to (`no_capacity`), pages that are not there or shared, sealed slots in part of a
  /// page, `ems` in another capacity.
  void copy(const compressor& other, index_t from, index_t to);

  /// Saves a request: rows, states, and what its heads are held to. Policies and budgets are the
  /// program's. Several may follow one another in a (binary) stream.
  /// Refused: a request that is not there, a prompt or draft in between, a stream that fails.
  void save(std::ostream& out, index_t request) { detail::save_request(open_, out, request); }
  /// Loads what `save` saved into a request of the same shape, policies and storage; decoding goes
  /// on bit for bit. Refused, with nothing changed: anything else, an end too early, another
  /// checksum (`corrupt_file`).
  void load(std::istream& in, index_t request) { detail::load_request(open_, in, request); }

  /// As `kv.shrink(meld, capacity)`: `capacity` slots a head from here on. Refused, with nothing
  /// changed: another cache, more slots than there are, fewer than a head or its budget needs
  /// (`no_capacity`), a prompt or draft in between.
  void shrink(kv_cache auto& kv, index_t capacity) {
    expects(open_.kv.is(&kv), "shrink: expected the cache that is compressed, got another");
    expect_shrink(capacity);
    kv.shrink(capacity);
  }

  // --------------------------------------------------------------------------- what it holds

  /// The policy of a head of the cache. Refused, as of the others below: a head that is not there.
  const P& policy_of(index_t head) const {
    open_.expect_head("policy_of", head);
    return open_.policies.policy_of(head);
  }
  /// What the policy remembers of a head of the cache.
  const head_state& state(index_t head) const { return held("state", head).state; }
  /// Takes the state of a head that was measured and compressed by the functions of one head, as
  /// where several budgets share what a prompt was measured as. The cache has its rows. Where heads
  /// share a budget, this one is held to the slots that it has, as its part.
  /// Refused: a state of another kind, one for fewer slots, one of more slots than the head has
  /// after its seal, a prompt or draft in between.
  void set_state(index_t head, head_state state);
  /// How many slots of a head are sealed, and how many after these hold pinned tokens.
  /// @{
  index_t sealed(index_t head) const { return held("sealed", head).kept.sealed; }
  index_t pinned(index_t head) const { return held("pinned", head).kept.pinned; }
  /// @}
  /// What a head is held to while decoding, without its sealed and pinned slots.
  const budget& limit(index_t head) const { return held("limit", head).limit; }
  /// Bytes that the states of the slots in use take.
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const detail::one_head& one : open_.heads) {
      sum += one.state.bytes();
    }
    return sum;
  }
  /// Bytes that the states of all heads and what is kept of prompts' queries hold at present, in
  /// use or not. The scratch of workers is not counted.
  std::size_t reserved_bytes() const {
    std::size_t sum = 0;
    for (const detail::one_head& one : open_.heads) {
      sum += one.state.reserved_bytes() + one.held.bytes();
    }
    return sum;
  }

 private:
  using lease = detail::workspace_pool::lease;

  const detail::one_head& held(const char* call, index_t head) const {
    open_.expect_head(call, head);
    return open_.of(head);
  }
  /// A prompt's queries: of the heads chosen, no more than tokens, finite where a head checks.
  void expect_queries(const head_selection& heads, const queries& q) const;
  /// Slots that a request's heads are brought to after its prompt, without the kept ones.
  std::vector<index_t> prompt_slots(const std::vector<index_t>& heads, const process_group& group);
  void expect_step(const head_selection& heads, const step_input& in, std::span<float> out) const;
  /// What of a step's attention is there; makes `in.stride` what it is.
  observation_needs expect_observed(const head_selection& heads, step_attention& in) const;
  void observe_head(index_t h, index_t i, const step_attention& in, const observation_needs& given,
                    workspace& work);
  /// Refused: head `a` of another compressor that this one could not go on with as head `b`.
  void expect_same(const compressor& all, index_t a, index_t b) const;
  void expect_shrink(index_t capacity) const;

  detail::open_heads<P> open_;
  detail::workspace_pool pool_;
};

/// One policy for all heads.
template <kv_cache Cache, policy P>
compressor(Cache&, P, const budget&, const observation_needs& = {}) -> compressor<P>;
/// One for each head.
template <kv_cache Cache, class Policies>
compressor(Cache&, const Policies&, std::span<const budget>, const observation_needs& = {})
    -> compressor<detail::element_of<const Policies>>;

// Not in the class: what is inline is compiled by every file, `extern template` or not.

template <policy P>
void compressor<P>::expect_queries(const head_selection& heads, const queries& q) const {
  heads.check("prompt", open_.kv.heads());
  open_.admit("prompt", heads, open::prompt);
  expects(heads.count() == q.kv_heads(), "prompt: expected queries of ", heads.count(),
          " KV heads, got ", q.kv_heads());
  for (index_t i = 0; i < heads.count(); ++i) {
    const index_t h = heads[i];
    const head_ref head = open_.kv.head(h);
    expects(open_.kv.together(h, heads[0]),
            "prompt: expected heads of one layer and request, got heads ", heads[0], " and ", h);
    expects(head.group() == q.group() && head.dim() == q.dim(), "prompt: expected queries of [",
            head.group(), ", ", head.dim(), "] per KV head, got [", q.group(), ", ", q.dim(), "]");
    const index_t tokens = open_.new_slots(h);
    expects(q.tokens() <= tokens, "prompt: expected at most ", tokens,
            " queries (the tokens that are not measured yet), got ", q.tokens());
    if (head.check_finite()) {
      expect_finite("prompt: expected finite queries", q.rows());
    }
    if (open_.is_whole(h)) {
      q.of_head(i, [&](const auto& own) { expect_log_sum_exp("prompt", head, own); });
    }
  }
}

template <policy P>
std::vector<index_t> compressor<P>::prompt_slots(const std::vector<index_t>& heads,
                                                 const process_group& group) {
  const auto& policies = open_.policies;
  expects(errc::unsupported, !policies.alike() || !group.gather,
          "end_prompt: expected one process where heads keep the same tokens, got several");
  open_.expect_alike("end_prompt", heads);
  std::vector<index_t> slots, sharing, most;
  std::deque<detail::seen_head> seen;
  for (const index_t h : heads) {
    const detail::one_head& one = open_.of(h);
    slots.push_back(open_.slots_of(h));
    if (policies.shares(h)) {
      sharing.push_back(h), seen.emplace_back(open_.kv.head(h), one.kept);
      most.push_back(policies.most_of(h, one.kept, one.goes_on ? open_.new_tokens(h) : 0));
    }
    if (policies.alike(h)) {
      open_.expect_prompt("end_prompt", h, {slots.back()});
    }
  }
  open_.average(heads, false);
  const auto state_of = [&](std::size_t i) -> head_state& { return open_.of(sharing[i]).state; };
  if (!sharing.empty()) {
    for (std::size_t i = 0; i < sharing.size(); ++i) {
      state_of(i).extend(seen[i].head().length());  // tokens without queries have no score
      open_.leave(sharing[i]);
    }
    const index_t first = sharing.front();
    const auto divided = divide_by_scores(
        policies.policy_of(first), [&](std::size_t i) -> const head_ref& { return seen[i].head(); },
        state_of, most,
        {.slots = open_.slots_of(first),
         .kv_heads = open_.kv.head(0).spec().kv_heads,
         .by_layer = policies.shares_by_layer(first),
         .group = group});
    for (std::size_t i = 0, next = 0; i < heads.size(); ++i) {
      slots[i] = policies.shares(heads[i]) ? divided[next++] : slots[i];
    }
  }
  for (std::size_t i = 0; i < heads.size(); ++i) {
    open_.expect_prompt("end_prompt", heads[i], {slots[i]});
  }
  return slots;
}

template <policy P>
void compressor<P>::expect_step(const head_selection& heads, const step_input& in,
                                std::span<float> out) const {
  open_.expect_rows("step", heads, in, out, 1);
  open_.expect_alike("step", heads);
  open_.admit("step", heads, open::nothing);
  for (const index_t h : heads) {
    open_.policies.with(h, [&](const auto& p) { check_token(p, open_.kv.head(h)); });
    open_.expect_own_pages("step", h, open_.of(h).limit, 1);
  }
  open_.expect_positions("step", heads, in, 1, true);
}

template <policy P>
observation_needs compressor<P>::expect_observed(const head_selection& heads,
                                                 step_attention& in) const {
  heads.check("observe", open_.kv.heads());
  open_.admit("observe", heads, open::nothing);
  const head_ref any = open_.kv.head(0);
  index_t longest = 0;
  for (const index_t h : heads) {
    longest = std::max(longest, open_.kv.head(h).length());
  }
  in.stride = in.stride > 0 ? in.stride : longest;
  expects(in.stride >= longest, "observe: expected a stride of at least ", longest, ", got ",
          in.stride);
  const auto expect = [&](const char* what, const any_span& x, index_t each) {
    if (x.size() > 0) {
      detail::expect_size("observe", what, x, {heads.count(), any.group(), each});
    }
    return x.size() > 0;
  };
  const observation_needs given = {expect("probabilities", in.probabilities, in.stride),
                                   expect("log_sum_exp", in.log_sum_exp, 1),
                                   expect("query", in.query, any.dim())};
  for (const index_t h : heads) {
    open_.policies.expect_given("observe", h, given);
    if (open_.of(h).kept.count() > 0) {
      open_.policies.expect_given_kept("observe", h, given);
    }
    expects(open_.kv.head(h).next_position() > open_.of(h).tokens,
            "observe: expected a token appended since the last call, got none in head ", h);
  }
  return given;
}

template <policy P>
void compressor<P>::observe_head(index_t h, index_t i, const step_attention& in,
                                 const observation_needs& given, workspace& work) {
  const head_ref all = open_.kv.head(h);
  const index_t n = all.length(), group = all.group(), first = i * group,
                kept = open_.of(h).kept.count();
  observation taken;
  if (given.probabilities) {
    for (index_t r = 0; r < group; ++r) {
      std::copy_n(in.probabilities.data() + as_size(first + r, in.stride), n,
                  work.attention.data() + as_size(r, n));
    }
    taken.probabilities = std::span(work.attention).first(as_size(group, n));
  }
  if (given.log_sum_exp) {
    taken.log_sum_exp = in.log_sum_exp.subspan(as_size(first), as_size(group));
  }
  if (kept > 0) {  // without the sinks' share only policies that need neither are here
    const bool whole = given.log_sum_exp || all.spec().sink_logits.empty();
    taken = given.probabilities && whole
                ? detail::observed_behind(all, kept, work, taken.log_sum_exp)
                : observation();
  }
  if (given.query) {
    taken.query =
        in.query.floats(std::ptrdiff_t{first} * all.dim(), group * all.dim(), work.input.data());
  }
  open_.wake_or_rest(h, 1);
  if (!open_.of(h).state.rests()) {
    const detail::seen_head seen = open_.seen(h);
    open_.policies.with(
        h, [&](const auto& p) { kvmeld::observe(p, seen.head(), open_.of(h).state, work, taken); });
  }
  open_.leave(h);
}

template <policy P>
void compressor<P>::seal(index_t request, index_t tokens) {
  const std::vector<index_t> heads = open_.closed("seal", request);
  std::vector<index_t> sealed;
  for (const index_t h : heads) {
    sealed.push_back(detail::expect_seal(open_, h, tokens));
  }
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const index_t h = heads[i];
    if (open_.of(h).kept.sealed != sealed[i]) {
      const detail::kept_slots kept{.sealed = sealed[i]};
      open_.of(h).state.clear();
      open_.hold_to(h, open_.policies.decode_limit(h, open_.policies.slots_of(h), kept), kept);
    }
  }
}

template <policy P>
void compressor<P>::pin(index_t request, index_t first, index_t count) {
  const std::vector<index_t> heads = open_.of_request("pin", request);
  expects(first >= 0 && count >= 0 && count <= std::numeric_limits<index_t>::max() - first,
          "pin: expected tokens from 0 on, got ", count, " from ", first);
  open_.admit("pin", heads, open::last_of_prompt);
  detail::pinned_tokens pinned = open_.pins[as_size(request)];
  pinned.add(first, first + count);
  for (const index_t h : heads) {
    if (!open_.policies.is_cut(h) && open_.policies.evicts(h)) {
      detail::expect_pins(open_, h, first, pinned);
    }
  }
  for (const index_t h : heads) {
    open_.of(h).gathered = std::min(open_.of(h).gathered, first);
  }
  open_.pins[as_size(request)] = std::move(pinned);
}

template <policy P>
void compressor<P>::clear(index_t request) {
  for (const index_t h : open_.of_request("clear", request)) {
    kvmeld::clear(open_.kv.head(h), open_.of(h).state);
    open_.hold_to(h, open_.policies.decode_limit(h, open_.policies.slots_of(h)), {});
    open_.of(h).compressed = open_.of(h).gathered = 0;
    open_.kv.count_pages(h);
  }
  open_.pins[as_size(request)] = {};
}

template <policy P>
void compressor<P>::copy(const compressor& other, index_t from, index_t to) {
  const detail::open_heads<P>& theirs = other.open_;
  const bool own = &other == this;
  const index_t per_request = open_.kv.per_request();
  expects(theirs.kv.per_request() == per_request, "copy: expected ", per_request,
          " heads per request, got ", theirs.kv.per_request());
  const auto source = theirs.closed("copy", from), target = open_.of_request("copy", to);
  if (own && from == to) {
    return;
  }
  open_.or_recount(target, [&] {
    for (std::size_t i = 0; i < source.size(); ++i) {
      const index_t a = source[i], b = target[i];
      const head_ref x = theirs.kv.head(a);
      if (!own) {
        expect_same(other, a, b);
      }
      detail::expect_copy(x, theirs.of(a).state, open_.kv.head(b), open_.of(b).state);
      open_.kv.expect_own_pages("copy", b, 0, x.length(), own ? a : -1);
    }
  });
  for (std::size_t i = 0; i < source.size(); ++i) {
    const index_t a = source[i], b = target[i];
    const detail::one_head& one = theirs.of(a);
    kvmeld::copy(theirs.kv.head(a), one.state, open_.kv.head(b), open_.of(b).state);
    open_.hold_to(b, one.limit, one.kept, one.goes_on);
    open_.of(b).compressed = one.compressed, open_.of(b).gathered = one.gathered;
    open_.of(b).tokens = one.tokens, open_.of(b).measured = one.measured;
    open_.kv.count_pages(b);
  }
  open_.pins[as_size(to)] = theirs.pins[as_size(from)];
}

template <policy P>
void compressor<P>::expect_same(const compressor& all, index_t a, index_t b) const {
  attention_spec theirs = all.open_.kv.head(a).spec();
  const attention_spec& ours = open_.kv.head(b).spec();
  theirs.check_finite = ours.check_finite;
  expects(theirs == ours, "copy: expected the attention of head ", b,
          " (its attention_spec), got another in head ", a);
  const P &p = open_.policies.policy_of(b), &q = all.open_.policies.policy_of(a);
  expects(declared(q) == declared(p), "copy: expected a request of ", p.name(),
          " with the same parameters, got one of ", q.name(), " in head ", a);
  expects(all.open_.policies.alike(a) == open_.policies.alike(b),
          "copy: expected requests whose layers keep the same tokens in both or in none, got one "
          "of each");
  const detail::one_head& one = all.open_.of(a);
  expects(one.kept.sealed % open_.kv.head(b).page_slots() == 0,
          "copy: expected sealed slots in whole pages of ", open_.kv.head(b).page_slots(), ", got ",
          one.kept.sealed, " in head ", a);
  open_.policies.expect_room("copy", b, one.kept, one.limit);
}

template <policy P>
void compressor<P>::expect_shrink(index_t capacity) const {
  for (index_t r = 0; r < open_.kv.requests(); ++r) {
    (void)open_.closed("shrink", r);
  }
  std::int64_t least = 1;
  for (index_t h = 0; h < open_.kv.heads(); ++h) {
    const detail::one_head& one = open_.of(h);
    least = std::max<std::int64_t>({least, open_.kv.head(h).length(), one.state.length(),
                                    open_.policies.least_capacity(h, one.limit, one.kept)});
  }
  expects(errc::no_capacity, capacity >= least, "shrink: expected a capacity of at least ", least,
          " slots (those in use, and the budgets), got ", capacity);
}

template <policy P>
void compressor<P>::set_state(index_t head, head_state state) {
  open_.expect_head("set_state", head);
  open_.admit("set_state", head, open::by_hand);
  const head_ref own = open_.kv.head(head);
  open_.policies.with(head, [&](const auto& p) { detail::expect_state(p, own, state); });
  expects(state.capacity() >= own.capacity(), "set_state: expected a state for ", own.capacity(),
          " slots, got one for ", state.capacity());
  const index_t slots = open_.seen_length(head);
  expects(state.length() <= slots, "set_state: expected a state of at most ", slots,
          " slots, got one of ", state.length());
  detail::one_head& one = open_.of(head);
  const budget limit =
      open_.policies.shares(head) ? open_.policies.decode_limit(head, slots, one.kept) : one.limit;
  const bool may_rest = open_.policies.with(head, [&](const auto& p) {
    const index_t steps = declared(p).decode_use().steps;
    return steps == 0 || open_.is_far(slots - 1, steps, limit);  // the next step is observed
  });
  expects(!state.rests() || may_rest,
          "set_state: expected a state that observed the steps before a plan of ",
          limit.trigger_length(), " slots, got one that rests, of ", slots);
  one.limit = limit;
  one.state = std::move(state);
  open_.leave_measured(head);
  open_.wake_or_rest(head);
}

}  // namespace kvmeld::inline v0
