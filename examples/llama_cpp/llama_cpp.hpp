// SPDX-License-Identifier: MIT
/// KV-cache compression for an unpatched llama.cpp, through its evaluation callback:
///
///     kvmeld::llama::compressor kv(model, kvmeld::fold{}, {.limits = {{.slots = 512}}});
///     kv.attach(params);                                    // llama_context_params
///     llama_context* ctx = llama_init_from_model(model, params);
///     kv.bind(ctx);
///     llama_decode(ctx, batch), kv.check();                 // which throws what went wrong in it
///
/// `mode::repack`: the engine's own attention over its own cells, whose rows are rewritten head by
/// head; cells that are free are given back, so that any text goes through a small n_ctx.
/// `mode::own_attention`: every head has a cache of its own, as long as its own budget, and its
/// attention takes the place of the engine's; the engine's cells hold the newest token alone.
/// Layers that attend to a window are the engine's in both modes: their cells are left alone, and
/// in the other layers as many tokens as a window keep theirs.
/// A sequence begins at position 0. A batch may be as long as the cells that are free. With own
/// attention there may be several sequences in a unified context, each compressed apart: `announce`
/// says before llama_decode whose tokens a batch has, and which are drafts, that is, may be taken
/// back by `llama_memory_seq_rm`. Repack has one sequence at a time, and takes nothing back.
/// Budgets that the heads of the model share (`budget::shared(512)`, the best for `fold`) are
/// divided when the prompt has ended: `kv.end_prompt(sequence)` after its last llama_decode. Until
/// then all of it is held.
#pragma once

#include <exception>
#include <optional>

#include "llama_cpp/attention.hpp"
#include "llama_cpp/layers.hpp"
#include "llama_cpp/refusals.hpp"
#include "llama_cpp/sequences.hpp"

namespace kvmeld::llama {

template <policy P>
class compressor {
 public:
  /// Refused: models that cannot be compressed, budgets that do not fit the policy or the model.
  compressor(const llama_model* model, P p, options o)
      : policy_(std::move(p)), options_(std::move(o)), setup_(setup_of(model, policy_, options_)) {
    reset();
  }
  compressor(const compressor&) = delete;
  compressor& operator=(const compressor&) = delete;

  /// Before the context is made. Refused, with nothing changed: quantised keys but Q8_0 under own
  /// attention, several sequences without unified KV, fewer cells than a trigger.
  void attach(llama_context_params& params) {
    llama_context_params p = params;
    prepare(p, options_.how);
    const layers_setup before = setup_;
    const auto prepared = [&] {
      setup_.capacity = capacity_of(policy_, setup_, p);
      setup_.requests = own() ? static_cast<index_t>(p.n_seq_max) : 1;
      setup_.rows = p.type_k;
      setup_.storage = storage_of(p.type_k, setup_.spec.key_dim);
      setup_.held = options_.rows.value_or(setup_.storage);
      reset();
    };
    kvmeld::detail::or_undo(prepared, [&] { setup_ = before, reset(); });
    p.cb_eval = on_node;
    p.abort_callback = failed;
    p.cb_eval_user_data = p.abort_callback_data = this;
    params = p;
  }

  /// The context made with these parameters. `compressor` must live as long as it decodes.
  void bind(llama_context* context) {
    expects(context != nullptr, "llama.cpp: expected a context, got null");
    context_ = context, memory_ = llama_get_memory(context);
    sequences_.bind(memory_, static_cast<llama_seq_id>(llama_n_seq_max(context)));
  }

  /// Before llama_decode: each token's sequence is the batch's, or 0; without it, the only one in
  /// the engine. `draft`: they count when `accept`, or where the sequence goes on, says how many.
  /// Refused: repack, sequences beyond n_seq_max, drafts of several micro-batches, a policy that
  /// compresses prompts only.
  void announce(const llama_batch& batch, bool draft = false) {
    expects(context_ != nullptr, "announce: expected bind(context) before it");
    const auto most = static_cast<int>(llama_n_ubatch(context_));
    expects(!draft || batch.n_tokens <= most, "announce: expected a draft of at most ", most,
            " tokens (n_ubatch), got ", batch.n_tokens);
    expects(!draft || kvmeld::declared(policy_).supports_decode(),
            "announce: expected no draft under ", policy_.name(),
            ", which compresses prompts only, got one");
    std::vector<announced_token> tokens;
    for (int i = 0; i < batch.n_tokens; ++i) {
      const int of = batch.n_seq_id != nullptr ? batch.n_seq_id[i] : 1;
      expects(of == 1, "announce: expected tokens of one sequence each, got one of ", of);
      tokens.push_back({batch.seq_id != nullptr ? batch.seq_id[i][0] : 0,
                        draft ? token_kind::draft : token_kind::text});
    }
    announce(std::move(tokens));
  }
  /// The same, token by token: those of a sequence in a micro-batch are what its first is. Refused
  /// as above, but for drafts: see there.
  void announce(std::vector<announced_token> tokens) {
    expects(context_ != nullptr, "announce: expected bind(context) before it");
    sequences_.announce(std::move(tokens));
  }

  /// Did a graph break off, so that nothing but `reset` is possible?
  bool broken() const { return begun_ && error_ != nullptr; }

  /// Throws what went wrong within llama_decode, whatever it returned: 2 where the graph could be
  /// stopped, 0 where it was at its end, as in compression. `reset` makes good again. What was
  /// refused before anything was changed is said once: the text may go on.
  void check() {
    sequences_.forget_announcement();
    at_.clear();
    if (error_) {
      std::rethrow_exception(begun_ ? error_ : std::exchange(error_, nullptr));
    }
    sequences_.expect_seen();
  }

  /// Tokens that the next draft of a sequence may have to see what single steps would: with the
  /// last of them, or none, a head is compressed. Later ones would see slots that a step evicts.
  /// Refused: repack, a draft that was not accepted yet.
  index_t draft_room(llama_seq_id sequence = 0) {
    const index_t r = settled("draft_room", sequence);
    return std::min(static_cast<index_t>(llama_n_ubatch(context_)), layers_->draft_room(r));
  }

  /// Ends all drafts: tokens that `llama_memory_seq_rm` has left count, as so many steps; the
  /// others were never there. Refused, with nothing changed: tokens before a draft taken away.
  void accept() {
    expect_between("accept");
    std::vector<std::pair<index_t, index_t>> left;  // all or none are decided
    for (index_t r = 0; r < sequences_.count(); ++r) {
      if (sequences_[r].drafted > 0) {
        left.emplace_back(r, sequences_.left(r));
      }
    }
    for (const auto& [r, kept] : left) {
      decide(r, kept);
      settle(r);
    }
  }

  /// A sequence's prompt is over: heads that share a budget are brought to their parts of it, and
  /// free cells go back to the engine. To be called between two llama_decode; nothing to do where
  /// budgets are not shared, since every micro-batch of several tokens ends its own.
  void end_prompt(llama_seq_id sequence = 0) {
    expect_between("end_prompt");
    const index_t r = own() ? sequences_.expect_own("end_prompt", sequence) : 0;
    layers_->end_prompt(r);
    settle(r);
  }

  /// Pins `count` tokens of a sequence from token `first` on: no policy evicts or merges them, in
  /// any layer that is compressed. Between two llama_decode, before these tokens are compressed or
  /// decoded at all; the budget counts them. Until the sequence is removed or begins again.
  /// Refused, with nothing changed: what `kvmeld::compressor::pin` refuses, a draft in between.
  void pin(index_t first, index_t count, llama_seq_id sequence = 0) {
    expect_between("pin");
    layers_->pin(own() ? sequences_.expect_own("pin", sequence) : 0, first, count);
  }

  /// Sequence `to` becomes what `from` is, compressed or not, in the engine too: instead of
  /// llama_memory_seq_cp. Refused: repack, a prompt or a draft of `from` in between.
  void copy(llama_seq_id from, llama_seq_id to);

  /// Forgets a sequence at once, in the engine too: instead of `llama_memory_seq_rm` of all of it,
  /// with which it is forgotten at the next micro-batch. Refused: repack.
  void remove(llama_seq_id sequence) {
    expect_between("remove");
    forget(sequences_.expect_own("remove", sequence));
    llama_memory_seq_rm(memory_, sequence, -1, -1);
  }

  /// Saves a sequence, with the engine's own state of it (`llama_state_seq_get_data`). Refused:
  /// repack, layers that keep all, no tokens, a prompt or a draft in between.
  void save(std::ostream& out, llama_seq_id sequence = 0);
  /// Loads what `save` saved. Refused, with nothing changed: repack, layers that keep all, a
  /// sequence that has tokens, changed bytes, heads of another policy, shape, capacity, scale or
  /// row type, a state that llama.cpp does not take or of other tokens than the heads. The caller
  /// sees to the same model, parameters of the policy and context, and budgets.
  void load(std::istream& in, llama_seq_id sequence = 0);

  /// Forgets all; goes with llama_memory_clear. A sequence that the engine has removed, or that
  /// begins again at position 0, is forgotten without it.
  void reset();
  kvmeld::llama::report report() { return layers_->report(sequences_.all()); }
  /// Slots that a head may hold, of the first sequence on average; 0: all is kept.
  index_t slots() const { return layers_->slots(); }

  layers<P>& held() { return *layers_; }  ///< for inspection

 private:
  bool own() const { return options_.how == mode::own_attention; }
  static bool failed(void* self) { return static_cast<compressor*>(self)->error_ != nullptr; }

  /// llama.cpp's callback: asked of every node, whether to call again when it is computed. A false
  /// the second time would skip the rest of the graph in silence: never.
  static bool on_node(ggml_tensor* t, bool ask, void* self) noexcept;

  bool wants(ggml_tensor* t);
  void computed(ggml_tensor* t);
  void note_positions(const ggml_tensor* t);
  void note_rows(ggml_tensor* t);
  /// False: the layer is the engine's alone.
  bool note_attention(index_t l, const ggml_tensor* t, mode expected, const ggml_tensor* mask);

  void finish();                 // all layers have attended: back to the budgets
  void settle(index_t request);  // free cells back to the engine
  /// As if the sequence had never been there.
  void forget(index_t request) {
    layers_->clear(request);
    sequences_[request] = {};
  }
  /// So many tokens of the sequence's draft count.
  void decide(index_t request, index_t kept) {
    layers_->accept(request, kept);
    sequences_[request].decide(kept);
  }
  /// Refused: a call within llama_decode, or after one that failed.
  void expect_between(const char* call) {
    expects(!begun_ && !error_, call, ": expected check() first, got an error in llama_decode");
    for (const index_t r : sequences_.removed()) {
      forget(r);
    }
  }
  /// A sequence's request. Refused: no context, repack, a prompt or a draft in between.
  index_t settled(const char* call, llama_seq_id sequence) {
    expects(context_ != nullptr, call, ": expected bind(context) before it");
    expect_between(call);
    const index_t r = sequences_.expect_own(call, sequence);
    expects(sequences_[r].drafted == 0, call, ": expected accept first, got a draft");
    expects(!layers_->open(r), call, ": expected end_prompt first, got a prompt");
    return r;
  }

  P policy_;
  options options_;
  layers_setup setup_;
  std::optional<layers<P>> layers_;
  llama_context* context_ = nullptr;
  llama_memory_t memory_ = nullptr;
  sequences sequences_;
  std::vector<chunk> chunks_;            // of the present micro-batch
  std::vector<index_t> new_cells_, at_;  // [its tokens] cells and positions
  bool begun_ = false;
  std::exception_ptr error_;
};

// Outside of the class, so that one instantiation serves all files (compressor.cpp).
template <policy P>
void compressor<P>::reset() {
  error_ = nullptr;
  begun_ = false;
  at_.clear();
  sequences_.reset(setup_.requests, own());
  layers_.emplace(setup_, policy_);
}

template <policy P>
void compressor<P>::settle(index_t request) {
  sequence& s = sequences_[request];
  // The newest token keeps its cell: the next position has to follow on one that is there. So do
  // the tokens of a window, which the engine would free in windowed layers too.
  const auto held = static_cast<index_t>(s.cells.size()),
             recent = std::min(std::max(setup_.window, 1), held), keep = layers_->settle(recent);
  if (keep >= held || s.drafted > 0) {
    return;
  }
  const auto [first, last] = s.free(keep, recent);
  if (!own()) {
    layers_->cache().move_to(s.cells);
  }
  expects(llama_memory_seq_rm(memory_, sequences_.id(request), first, last),
          "llama.cpp: cells could not be freed");
}

}  // namespace kvmeld::llama

#include "llama_cpp/graphs.hpp"
#include "llama_cpp/states.hpp"
