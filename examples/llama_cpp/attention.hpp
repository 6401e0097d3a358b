// SPDX-License-Identifier: MIT
/// What a layer's attention computes, read off its softmax or its flash attention.
#pragma once

#include <cmath>  // std::isinf
#include <optional>

#include "kvmeld/memory/attention_spec.hpp"
#include "llama_cpp/nodes.hpp"

namespace kvmeld::llama {

/// A node of logits: `scale · x`, or `cap · tanh(scale · x / cap)`, of products of keys and
/// queries.
struct logits_of {
  const ggml_tensor* products = nullptr;
  float scale = 1, cap = 0;

  /// None: `t` is another node.
  static std::optional<logits_of> read(const ggml_tensor* t) {
    const auto scaled = [](const ggml_tensor* x) {
      return x->op == GGML_OP_SCALE && parameter<float>(x, 1) == 0.0F;
    };
    if (t->op == GGML_OP_MUL_MAT) {
      return logits_of{t};
    }
    if (!scaled(t) || t->src[0]->op != GGML_OP_UNARY ||
        ggml_get_unary_op(t->src[0]) != GGML_UNARY_OP_TANH) {
      return {};
    }
    const ggml_tensor* const inner = t->src[0]->src[0];
    if (!scaled(inner) || inner->src[0]->op != GGML_OP_MUL_MAT) {
      return {};
    }
    const float cap = parameter<float>(t, 0);
    return logits_of{inner->src[0], cap * parameter<float>(inner, 0), cap};
  }

  /// The layer whose capped logits these are; -1: none's.
  static index_t capped_layer(const ggml_tensor* t) {
    const auto found = t->op == GGML_OP_SCALE ? read(t) : std::nullopt;
    return found ? number_behind("kq-", found->products->name) : -1;
  }
};

/// Scale, soft cap and sinks of a softmax or a flash attention, into `to`. The factor that the node
/// itself has before its exponential: `scale` without a cap.
/// Refused: ALiBi, logits of another form, sinks of another number than query heads.
inline float read_attention(const ggml_tensor* t, index_t layer, attention_spec& to) {
  const bool flash = t->op == GGML_OP_FLASH_ATTN_EXT;
  const float factor = parameter<float>(t, 0), bias = parameter<float>(t, 1);
  expects(bias == 0.0F, "llama.cpp: expected layer ", layer,
          " without ALiBi (a bias of 0), got one of ", bias);
  if (flash) {
    to.scale = factor;
    to.soft_cap = parameter<float>(t, 2);
  } else {
    const auto logits = logits_of::read(t->src[0]);
    expects(logits.has_value(), "llama.cpp: expected logits of layer ", layer,
            " that are products, or these with a cap, got ", ggml_op_name(t->src[0]->op));
    to.scale = factor * logits->scale;
    to.soft_cap = factor * logits->cap;
  }
  const ggml_tensor* const sinks = t->src[flash ? 4 : 2];
  to.sink_logits.clear();
  if (sinks != nullptr) {
    expect_on_host(sinks);
    expects(sinks->ne[0] == to.query_heads(), "llama.cpp: expected ", to.query_heads(),
            " sinks in layer ", layer, ", got ", sinks->ne[0]);
    const float* const first = element(sinks, 0);
    to.sink_logits.assign(first, first + to.query_heads());
  }
  return factor;
}

/// What a mask `[cells, tokens]` adds to the logit of the micro-batch's token `i` and `cell`.
inline float masked(const ggml_tensor* mask, index_t i, index_t cell, index_t layer) {
  expects(i < mask->ne[1] && cell < mask->ne[0], "llama.cpp: expected a mask of layer ", layer,
          " over token ", i, " and cell ", cell, ", got [", mask->ne[0], ", ", mask->ne[1], "]");
  const auto* const at = static_cast<const char*>(mask->data) +
                         static_cast<std::size_t>(i) * mask->nb[1] +
                         static_cast<std::size_t>(cell) * mask->nb[0];
  return mask->type == GGML_TYPE_F16 ? ggml_fp16_to_fp32(*reinterpret_cast<const ggml_fp16_t*>(at))
                                     : *reinterpret_cast<const float*>(at);
}

/// Refused: a mask that keeps the micro-batch's token `i` from one of `cells`, as that of a window
/// does.
inline void expect_attended(const ggml_tensor* mask, index_t i, std::span<const index_t> cells,
                            index_t layer) {
  expects(mask != nullptr, "llama.cpp: expected a mask in layer ", layer, ", got ", another_graph);
  expect_on_host(mask);
  for (const index_t cell : cells) {
    if (cell < 0) {
      continue;  // as of a sequence that was loaded
    }
    const float x = masked(mask, i, cell, layer);
    expects(x == 0, "llama.cpp: expected layer ", layer, " to attend to every token alike, got ", x,
            " in its mask of cell ", cell);
  }
}

/// Refused: one that lets the first token of a micro-batch attend to its last, in `cell`, as for an
/// image (`llama_set_causal_attn`).
inline void expect_causal(const ggml_tensor* mask, index_t i, index_t cell, index_t layer) {
  const float x = masked(mask, i, cell, layer);
  expects(x < 0 && std::isinf(x), "llama.cpp: expected causal attention in layer ", layer,
          " with mode own_attention, got ", x, " in its mask of a later token");
}

}  // namespace kvmeld::llama
