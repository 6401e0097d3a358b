// SPDX-License-Identifier: MIT
/// What the adapter cannot compress: said before a context is made, or before a micro-batch.
#pragma once

#include <llama.h>

#include <array>
#include <string>

#include "llama_cpp/nodes.hpp"
#include "llama_cpp/setup.hpp"
#include "llama_cpp/windows.hpp"

namespace kvmeld::llama {

/// A model's metadatum; empty: it has none.
inline std::string metadatum(const llama_model* model, const std::string& key) {
  std::array<char, 256> text{};
  const int n = llama_model_meta_val_str(model, key.c_str(), text.data(), text.size());
  return n < 0 ? "" : text.data();
}

/// What decides whether a model's attention is softmax over all earlier tokens, each with a key and
/// a value of its own.
struct model_facts {
  std::string architecture;
  bool recurrent = false, hybrid = false, encoder = false, diffusion = false;
  llama_rope_type rotation = LLAMA_ROPE_TYPE_NORM;
  bool latent = false;
  index_t heads = 0, kv_heads = 0, dim = 0, value_dim = 0, context = 0;

  static model_facts of(const llama_model* model) {
    expects(model != nullptr, "llama.cpp: expected a model, got null");
    const std::string arch = metadatum(model, "general.architecture");
    const auto own = [&](const char* key) { return metadatum(model, arch + "." + key); };
    const auto number = [&](const char* key, index_t without) {
      const std::string text = own(key);
      return text.empty() ? without : static_cast<index_t>(std::stol(text));
    };
    const index_t heads = llama_model_n_head(model);
    const index_t dim =
        number("attention.key_length", llama_model_n_embd(model) / std::max(heads, 1));
    return {
        .architecture = arch,
        .recurrent = llama_model_is_recurrent(model),
        .hybrid = llama_model_is_hybrid(model),
        .encoder = llama_model_has_encoder(model) || !llama_model_has_decoder(model),
        .diffusion = llama_model_is_diffusion(model),
        .rotation = llama_model_rope_type(model),
        .latent =
            !own("attention.kv_lora_rank").empty() || !own("attention.key_length_mla").empty(),
        .heads = heads,
        .kv_heads = llama_model_n_head_kv(model),
        .dim = dim,
        .value_dim = number("attention.value_length", dim),
        .context = llama_model_n_ctx_train(model),
    };
  }
};

/// What a layer computes, but for its scale and rotation. Refused: what cannot work.
inline attention_spec spec_of(const model_facts& m) {
  const auto refuse = [&](bool ok, const char* feature) {
    expects(ok, "llama.cpp: expected a model that can be compressed, got ", m.architecture,
            " with ", feature);
  };
  refuse(!m.recurrent, "recurrent memory: it has no KV cache");
  refuse(!m.hybrid, "hybrid memory: attention and recurrent layers");
  refuse(!m.encoder, "an encoder");
  refuse(!m.diffusion, "diffusion: its attention is not causal");
  refuse(m.rotation != LLAMA_ROPE_TYPE_MROPE && m.rotation != LLAMA_ROPE_TYPE_IMROPE &&
             m.rotation != LLAMA_ROPE_TYPE_VISION,
         "M-RoPE: positions of several numbers");
  refuse(m.rotation != LLAMA_ROPE_TYPE_NONE,
         "no RoPE: positions are read where queries are rotated by them");
  refuse(!m.latent, "MLA: its keys and values are one latent row");
  refuse(m.kv_heads > 0, "no KV heads in its first layer");
  refuse(m.value_dim == m.dim, "keys and values of different lengths");
  return attention_spec{.kv_heads = m.kv_heads,
                        .group = attention_spec::group_of(m.heads, m.kv_heads),
                        .key_dim = m.dim}
      .checked();
}

/// How the engine holds keys and values, and kvmeld too. Refused: rows that are no whole blocks.
inline storage storage_of(ggml_type type, index_t dim) {
  expects(type != GGML_TYPE_Q8_0 || dim % q8_0::size == 0,
          "llama.cpp: expected a dim that is a multiple of ", q8_0::size, " for q8_0, got ", dim);
  return type == GGML_TYPE_F32   ? storage::f32
         : type == GGML_TYPE_F16 ? storage::f16
                                 : storage::q8_0;
}

/// Refuses a context whose cells the adapter cannot use; sets what it needs where it was left open.
inline void prepare(llama_context_params& params, mode how) {
  const bool own = how == mode::own_attention;
  expects(params.type_k == GGML_TYPE_F32 || params.type_k == GGML_TYPE_F16 ||
              (own && params.type_k == GGML_TYPE_Q8_0),
          "llama.cpp: expected keys in f32 or f16 (in mode own in q8_0 too), got quantised K (",
          ggml_type_name(params.type_k), ")");
  expects(params.type_v == params.type_k, "llama.cpp: expected values in ",
          ggml_type_name(params.type_k), " as the keys, got ", ggml_type_name(params.type_v));
  expects(params.n_seq_max == 1 || params.kv_unified,
          "llama.cpp: expected one sequence, or unified KV (kv_unified), got ", params.n_seq_max,
          " sequences without unified KV");
  expects(params.cb_eval == nullptr, "llama.cpp: expected no cb_eval, got another one");
  expects(!params.embeddings && params.attention_type != LLAMA_ATTENTION_TYPE_NON_CAUSAL,
          "llama.cpp: expected causal attention that makes logits, got embeddings");
  const auto wanted = own ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  expects(params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO || params.flash_attn_type == wanted,
          "llama.cpp: expected flash attention ", own ? "on" : "off", " (or auto) in mode ",
          own ? "own" : "repack", ", got ", own ? "off" : "on");
  params.flash_attn_type = wanted;
  params.offload_kqv = params.swa_full = false;
}

/// Slots that a head may hold between steps, at most.
inline index_t most_slots(const layers_setup& setup) {
  index_t most = 0;
  for (const budget& b : setup.limits) {
    most = std::max({most, b.trigger - 1, b.slots + b.slack});
  }
  return most;
}

/// Does the policy's mass function read queries? `mode::repack` edits products, and has none.
template <policy P>
bool masses_read_queries(const P& p) {
  if constexpr (requires { p.visit([](const auto&) { return true; }); }) {
    return p.visit([](const auto& one) { return masses_read_queries(one); });
  } else if constexpr (requires { p.merge_unrotated; }) {
    return p.merge_unrotated;
  }
  return false;
}

/// Refused: models that cannot be compressed, a policy that needs the prompt twice, another number
/// of budgets. What the policy refuses of them the compressor says.
template <policy P>
layers_setup setup_of(const llama_model* model, const P& p, const options& o) {
  const auto facts = model_facts::of(model);
  layers_setup setup{
      .how = o.how, .spec = spec_of(facts), .context = o.capacity > 0 ? o.capacity : facts.context};
  expects(kvmeld::declared(p).supports_decode() ||
              kvmeld::declared(p).prompt_use().plans != prompt_use::planned::none,
          "llama.cpp: expected a policy that decodes or "
          "plans on a prompt's queries, got ",
          p.name(), ", which scores prompts alone (kvzip in a second pass over the prompt)");
  expects(o.how == mode::own_attention || !masses_read_queries(p),
          "llama.cpp: expected mode::own_attention with ", p.name(),
          " and merge_unrotated=1, got mode::repack");
  const auto heads = static_cast<std::size_t>(setup.spec.kv_heads),
             layers = static_cast<std::size_t>(llama_model_n_layer(model)), given = o.limits.size();
  expects(given == 1 || given == layers || given == layers * heads,
          "llama.cpp: expected 1 budget, ", layers, " (one per layer) or ", layers * heads,
          " (one per KV head), got ", given);
  const bool in_bytes =
      o.share > 0 || std::ranges::any_of(o.limits, [](const budget& b) { return b.size != 0; });
  expects(o.how == mode::own_attention || (!in_bytes && !o.rows),
          "llama.cpp: expected budgets in slots and the engine's rows with mode::repack, got ",
          in_bytes ? "one in bytes" : "other rows");
  expects(o.share >= 0 && o.share <= 1, "llama.cpp: expected a share of 0 to 1, got ", o.share);
  expects(o.share == 0 || (given == 1 && o.limits[0].slots == 0 && o.limits[0].size == 0),
          "llama.cpp: expected one budget without slots and bytes beside a share, got another");
  setup.layers.assign(layers, kvmeld::declared(p).evicts() ? part::compressed : part::whole);
  for (const index_t l : o.untouched) {
    expects(l >= 0 && l < std::ssize(setup.layers), "llama.cpp: expected untouched layers 0 to ",
            layers - 1, ", got ", l);
    setup.layers[static_cast<std::size_t>(l)] = part::whole;
  }
  for (const index_t l : windowed_layers(model)) {
    setup.layers[static_cast<std::size_t>(l)] = part::windowed;
    setup.window = llama_model_n_swa(model);
  }
  expects(setup.heads() > 0, "llama.cpp: expected a layer that attends to all tokens, got ", layers,
          " layers with a window of ", setup.window);
  for (std::size_t i = 0; given > 1 && i < layers * heads; ++i) {
    if (setup.layers[i / heads] == part::compressed) {
      setup.limits.push_back(o.limits[given == layers ? i / heads : i]);
    }
  }
  if (setup.limits.empty()) {
    setup.limits = {o.limits.front()};
  }
  if (o.share == 1) {
    setup.limits[0].slots = setup.context - 1;
  } else if (o.share > 0) {
    const double numbers = 2.0 * setup.spec.key_dim * setup.spec.kv_heads *
                           setup.count(part::compressed) * (setup.context - 1);
    setup.limits[0].size = static_cast<std::int64_t>(o.share * numbers * sizeof(Eigen::half));
  }
  setup.capacity = in_bytes ? setup.context : most_slots(setup) + 1;
  setup.held = o.rows.value_or(storage::f16).checked();
  return setup;
}

/// The slots that each head has room for. Refused: fewer cells than a trigger.
template <policy P>
index_t capacity_of(const P& p, const layers_setup& setup, const llama_context_params& params) {
  const bool own = setup.how == mode::own_attention;
  const index_t cells = params.n_ctx > 0 ? static_cast<index_t>(params.n_ctx) : setup.context,
                trigger = most_slots(setup) + 1;
  const auto chunk =
      static_cast<index_t>(std::min(params.n_ubatch > 0 ? params.n_ubatch : 512U, params.n_batch));
  const bool whole = setup.count(part::whole) > 0;
  expects(own || !kvmeld::declared(p).evicts() || trigger <= cells,
          "llama.cpp: expected an n_ctx of at least ", trigger, " (the trigger), got ", cells);
  return !own ? (cells + 255) / 256 * 256
         : whole || !kvmeld::declared(p).supports_decode() || setup.limits.front().is_shared ||
                 setup.limits.front().size != 0
             ? setup.context
             : trigger - 1 + chunk;
}

}  // namespace kvmeld::llama
