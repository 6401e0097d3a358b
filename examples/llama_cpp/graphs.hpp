// SPDX-License-Identifier: MIT
/// What the adapter does at the nodes of llama.cpp's graphs, in their order.
#pragma once

#include "llama_cpp/llama_cpp.hpp"

namespace kvmeld::llama {

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
    // Without rows before it the softmax is refused, and there is no micro-batch to want them for.
    return options_.how == mode::repack && begun_ &&
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
    layers_->edit(c, t, sequences_[0].cells);
  } else if (const index_t k = number_behind("kq-", name); k >= 0) {
    expect_on_host(t);
    expects(t->ne[3] == 1, "llama.cpp: expected 1 stream of cells, got ", t->ne[3]);
    layers_->products(k, t);
    if (layers_->edits_products(k)) {
      layers_->edit(k, t, sequences_[0].cells);
    }
  } else {
    finish();
    begun_ = false;
    at_.clear();
  }
}

template <policy P>
void compressor<P>::note_positions(const ggml_tensor* t) {
  if (begun_ || !at_.empty() || t->src[1]->ne[0] != t->ne[2]) {
    return;  // known, or another's
  }
  read_indices(t->src[1], at_);
  chunks_ = sequences_.split(at_);
  for (const chunk& c : chunks_) {
    expects(c.kind != token_kind::draft || !layers_->open(c.request),
            "announce: expected end_prompt first, got a draft");
  }
  for (const index_t r : sequences_.removed()) {
    forget(r);
  }
  for (const chunk& c : chunks_) {
    if (const sequence& s = sequences_[c.request]; c.first == 0 && s.seen > 0) {
      forget(c.request);
    } else if (s.drafted > 0) {
      decide(c.request, c.first - static_cast<index_t>(s.decided()));
    }
    if (c.kind == token_kind::step) {
      layers_->end_prompt(c.request);
    }
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
    read_indices(t->src[1], new_cells_);
    for (chunk& c : chunks_) {
      for (const index_t i : c.tokens) {
        c.cells.push_back(new_cells_[static_cast<std::size_t>(i)]);
      }
    }
    begun_ = true;
    layers_->begin(chunks_);
  }
  auto& of = (*layers_)[std::max(k, v)];
  if (k >= 0 && !layers_->known()) {
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
  for (const chunk& c : chunks_) {
    const index_t last = c.tokens.back();
    expect_attended(mask, last, sequences_[c.request].cells, l);
    expect_attended(mask, last, c.cells, l);
    if (c.cells.size() > 1 && expected == mode::own_attention) {
      expect_causal(mask, c.tokens.front(), c.cells.back(), l);
    }
  }
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
  for (const chunk& c : chunks_) {
    sequence& s = sequences_[c.request];
    for (const index_t cell : c.cells) {
      s.cells.push_back(cell);
      s.positions.push_back(static_cast<index_t>(s.seen++));
    }
    s.drafted = c.kind == token_kind::draft ? static_cast<index_t>(c.cells.size()) : 0;
  }
  layers_->end();
  for (const chunk& c : chunks_) {
    settle(c.request);
  }
}

}  // namespace kvmeld::llama
