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
/// One sequence, from position 0, at a time. A batch may be as long as the cells that are free.
/// Budgets that the heads of the model share (`budget::shared(512)`, the best for `fold`) are
/// divided when the prompt has ended: `kv.end_prompt()` after its last llama_decode. Until then
/// all of it is held.
#pragma once

#include <exception>
#include <optional>

#include "llama_cpp/attention.hpp"
#include "llama_cpp/layers.hpp"
#include "llama_cpp/refusals.hpp"

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
    setup_.capacity = capacity_of(policy_, setup_, p);
    setup_.rows = p.type_k;
    setup_.storage = storage_of(p.type_k, setup_.spec.key_dim);
    p.cb_eval = on_node;
    p.abort_callback = failed;
    p.cb_eval_user_data = p.abort_callback_data = this;
    reset();
    params = p;
  }

  /// The context made with these parameters. `compressor` must live as long as it decodes.
  void bind(llama_context* context) {
    expects(context != nullptr, "llama.cpp: expected a context, got null");
    memory_ = llama_get_memory(context);
    sequences_ = static_cast<llama_seq_id>(llama_n_seq_max(context));
  }

  /// Throws what went wrong within llama_decode, whatever it returned: 2 where the graph could be
  /// stopped, 0 where it was at its end, as in compression. `reset` makes good again. What was
  /// refused before anything was changed is said once: the text may go on.
  void check() {
    if (error_) {
      std::rethrow_exception(begun_ ? error_ : std::exchange(error_, nullptr));
    }
    expect_seen(memory_, sequences_, seen_);
  }

  /// The prompt is over: heads that share a budget are brought to their parts of it, and free cells
  /// go back to the engine. To be called between two llama_decode; nothing to do where budgets are
  /// not shared, since every micro-batch of several tokens ends its own.
  void end_prompt();

  /// Forgets all; goes with llama_memory_clear. A batch that begins at position 0 does the same.
  void reset();
  kvmeld::llama::report report();

  layers<P>& held() { return *layers_; }  ///< for inspection

 private:
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

  void finish();  // all layers have attended: back to the budgets
  void settle();  // free cells back to the engine

  P policy_;
  options options_;
  layers_setup setup_;
  std::optional<layers<P>> layers_;
  llama_memory_t memory_ = nullptr;
  llama_seq_id sequences_ = 1;              // that the context has room for
  std::vector<index_t> cells_, positions_;  // [entries] in use, the newest last
  std::vector<index_t> chunk_, at_;         // [tokens] of the present micro-batch
  std::int64_t seen_ = 0;
  bool begun_ = false;
  std::exception_ptr error_;
};

// Outside of the class, so that one instantiation serves all files (compressor.cpp).
template <policy P>
void compressor<P>::reset() {
  error_ = nullptr;
  begun_ = false, seen_ = 0;
  cells_.clear(), positions_.clear();
  layers_.emplace(setup_, policy_);
}

template <policy P>
kvmeld::llama::report compressor<P>::report() {
  return layers_->report(seen_, static_cast<index_t>(cells_.size()));
}

template <policy P>
bool compressor<P>::on_node(ggml_tensor* t, bool ask, void* self) noexcept {
  auto& c = *static_cast<compressor*>(self);
  if (c.error_) {
    return !ask;
  }
  try {
    if (ask) {
      return c.wants(t);
    }
    c.computed(t);
  } catch (...) {
    c.error_ = std::current_exception();
  }
  return !ask;
}

template <policy P>
bool compressor<P>::wants(ggml_tensor* t) {
  const std::string_view name = t->name;
  if (t->op == GGML_OP_ROPE && name.starts_with("Qcur")) {
    note_positions(t);
  } else if (t->op == GGML_OP_SET_ROWS) {
    note_rows(t);
  } else if (t->op == GGML_OP_FLASH_ATTN_EXT) {
    const index_t l = number_behind("cache_k_l", root_of(t->src[1])->name);
    return note_attention(l, t, mode::own_attention, t->src[3]);
  } else if (const index_t l = number_behind("kq_soft_max-", name); l >= 0) {
    if (!note_attention(l, t, mode::repack, t->src[1])) {
      return false;
    }
    layers_->measure(l);
    return layers_->wants_probabilities(l);
  } else if (const index_t k = number_behind("kq-", name); layers_->holds(k)) {
    return options_.how == mode::repack &&
           (layers_->wants_queries(k) || layers_->edits_products(k));
  } else if (const index_t c = logits_of::capped_layer(t); layers_->holds(c)) {
    return layers_->edits_capped(c);
  }
  return name == "result_output";
}

template <policy P>
void compressor<P>::computed(ggml_tensor* t) {
  const std::string_view name = t->name;
  expects(begun_, "llama.cpp: expected the cells of the tokens before '", name, "', got ",
          another_graph);
  if (t->op == GGML_OP_FLASH_ATTN_EXT) {
    expect_on_host(t);
    layers_->attend(number_behind("cache_k_l", root_of(t->src[1])->name), t);
  } else if (const index_t l = number_behind("kq_soft_max-", name); l >= 0) {
    layers_->probabilities(l, t);
  } else if (const index_t c = logits_of::capped_layer(t); c >= 0) {
    layers_->edit(c, t, cells_);
  } else if (const index_t k = number_behind("kq-", name); k >= 0) {
    expect_on_host(t);
    expects(t->ne[3] == 1, "llama.cpp: expected 1 stream of cells, got ", t->ne[3]);
    layers_->products(k, t);
    if (layers_->edits_products(k)) {
      layers_->edit(k, t, cells_);
    }
  } else {
    finish();
    begun_ = false;
    at_.clear();
  }
}

template <policy P>
void compressor<P>::note_positions(const ggml_tensor* t) {
  if (begun_ || t->src[1]->ne[0] != t->ne[2]) {
    return;
  }
  read_indices(t->src[1], at_);
  expect_one_sequence(memory_, sequences_);
  if (at_[0] == 0 && seen_ > 0) {
    reset();
  }
  for (std::size_t i = 0; i < at_.size(); ++i) {
    expects(at_[i] == seen_ + static_cast<std::int64_t>(i),
            "llama.cpp: expected one sequence at consecutive positions, next ",
            seen_ + static_cast<std::int64_t>(i), ", got ", at_[i]);
  }
}

template <policy P>
void compressor<P>::note_rows(ggml_tensor* t) {
  ggml_tensor* const root = root_of(t);
  const index_t k = number_behind("cache_k_l", root->name),
                v = number_behind("cache_v_l", root->name);
  if (!layers_->holds(std::max(k, v))) {
    return;
  }
  if (!begun_) {
    expect_on_host(root);
    expects(k >= 0 && t->src[1]->ne[0] == static_cast<std::int64_t>(at_.size()),
            "llama.cpp: expected keys, then values, for the ", at_.size(),
            " positions before them, got '", root->name, "' for ", t->src[1]->ne[0],
            " tokens: ", another_graph);
    read_indices(t->src[1], chunk_);
    begun_ = true;
    layers_->begin(chunk_);
  }
  auto& of = (*layers_)[std::max(k, v)];
  if (k >= 0 && seen_ == 0) {
    of.model.rope = rope_of(rotation_behind(t));
  }
  (k >= 0 ? of.engine.keys : of.engine.values) = root;
  (k >= 0 ? of.came.keys : of.came.values) = true;
  expect_rows(root, std::int64_t{setup_.spec.kv_heads} * setup_.spec.key_dim, setup_.rows);
}

template <policy P>
bool compressor<P>::note_attention(index_t l, const ggml_tensor* t, mode expected,
                                   const ggml_tensor* mask) {
  expects(options_.how == expected && l >= 0,
          "llama.cpp: expected the flash attention that was prepared, got ", another_graph);
  if (!layers_->holds(l)) {
    return false;
  }
  expects(begun_, "llama.cpp: expected the cells of the tokens before '", t->name, "', got ",
          another_graph);
  const auto last = static_cast<index_t>(chunk_.size()) - 1;
  expect_attended(mask, last, cells_, l), expect_attended(mask, last, chunk_, l);
  auto& of = (*layers_)[l];
  of.factor = read_attention(t, l, of.model);
  if (!layers_->cache().whole(l)) {
    kvmeld::check(policy_, of.model);
  }
  of.came.scale = true;
  return true;
}

template <policy P>
void compressor<P>::finish() {
  expects(memory_ != nullptr, "llama.cpp: expected bind(context) before llama_decode");
  for (const index_t cell : chunk_) {
    cells_.push_back(cell);
    positions_.push_back(static_cast<index_t>(seen_++));
  }
  layers_->end();
  settle();
}

template <policy P>
void compressor<P>::end_prompt() {
  expects(!begun_ && !error_, "llama.cpp: expected check() first, got an error in llama_decode");
  layers_->end_prompt();
  settle();
}

template <policy P>
void compressor<P>::settle() {
  // The newest token keeps its cell: the next position has to follow on one that is there. So do
  // the tokens of a window, which the engine would free in windowed layers too.
  const auto held = static_cast<index_t>(cells_.size()),
             recent = std::min(std::max(setup_.window, 1), held), keep = layers_->settle(recent);
  if (keep >= held) {
    return;
  }
  const auto from = positions_.begin() + (keep - recent), to = positions_.end() - recent;
  const index_t first = *from, last = *to;
  positions_.erase(from, to);
  cells_.erase(cells_.begin() + (keep - recent), cells_.end() - recent);
  if (options_.how == mode::repack) {
    layers_->cache().move_to(cells_);
  }
  expects(llama_memory_seq_rm(memory_, -1, first, last), "llama.cpp: cells could not be freed");
}

}  // namespace kvmeld::llama
