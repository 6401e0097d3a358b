// SPDX-License-Identifier: MIT
#include <cmath>  // std::abs, std::isfinite

#include "engine/gguf/file.hpp"
#include "engine/model.hpp"

namespace engine {

namespace gguf {
namespace {

struct architecture {
  config shape;
  /// Are pairs of a rotation adjacent rows of `attn_q` and `attn_k`? Else they are half a head
  /// apart, as this engine has them.
  bool adjacent_pairs = false;
};

/// Llama 3.1's or 3.2's scaling, if dividing the frequencies of `plain` by `factors [dim / 2]`
/// gives it.
std::optional<kvmeld::rotary> llama3_of(const kvmeld::rotary& plain, const float* factors,
                                        index_t dim) {
  for (const double factor : {8.0, 32.0}) {  // Llama 3.1, Llama 3.2
    const kvmeld::rotary r = plain.llama3({.factor = factor});
    bool same = true;
    for (index_t p = 0; p < dim / 2; ++p) {
      const double f = plain.frequency(p, dim) / double{factors[p]};
      same = same && std::abs(f / r.frequency(p, dim) - 1) < 1e-4;
    }
    if (same) {
      return r;
    }
  }
  return {};
}

/// What Gemma 2 and 3 have beside a llama's parts. Layers without a window are every second or
/// sixth one, unless the file says otherwise.
void read_gemma(const file& from, const std::string& at, bool third, config& c) {
  c.post_norms = true;
  c.mlp = activation::gelu;
  c.embedding_scale = std::sqrt(static_cast<float>(c.hidden));
  const auto cap = [&](const char* key) {
    return static_cast<float>(from.has(at + key) ? from.number(at + key) : 0);
  };
  c.soft_cap = third ? 0 : cap("attn_logit_softcapping");
  c.logit_cap = cap("final_logit_softcapping");
  c.window = from.count(at + "attention.sliding_window", third ? 0 : 4096);
  c.full_every = from.count(at + "attention.sliding_window_pattern", third ? 6 : 2);
  c.window_rope = kvmeld::rotary::halves(
      from.number(at + "rope.freq_base_swa", third ? 10'000 : c.rope.base()));
  if (c.layers == (third ? 62 : 46)) {
    from.refuse("expected attention scaled by the head's dim, got that of the 27B model (",
                c.layers, " layers)");
  }
}

architecture read_architecture(const file& from) {
  const std::string name = from.word("general.architecture");
  const bool is_gemma = name == "gemma2" || name == "gemma3";
  if (!is_gemma && name != "llama" && name != "qwen2" && name != "qwen3") {
    from.refuse(
        "expected architecture \"llama\", \"qwen2\", \"qwen3\", \"gemma2\" or \"gemma3\", got \"",
        name, "\"");
  }
  const std::string at = name + ".";
  std::vector<std::string_view> known = {"vocab_size",
                                         "context_length",
                                         "embedding_length",
                                         "block_count",
                                         "feed_forward_length",
                                         "attention.head_count",
                                         "attention.head_count_kv",
                                         "attention.key_length",
                                         "attention.value_length",
                                         "attention.layer_norm_rms_epsilon",
                                         "rope.dimension_count",
                                         "rope.freq_base",
                                         "rope.scaling.type",
                                         "rope.scaling.factor"};
  if (is_gemma) {
    known.insert(known.end(),
                 {"attention.sliding_window", "attention.sliding_window_pattern",
                  "rope.freq_base_swa", "attn_logit_softcapping", "final_logit_softcapping"});
  }
  from.expect_keys(at, known);
  architecture a{.shape = {}, .adjacent_pairs = name == "llama"};
  config& c = a.shape;
  c.hidden = from.count(at + "embedding_length");
  c.intermediate = from.count(at + "feed_forward_length");
  c.layers = from.count(at + "block_count");
  c.heads = from.count(at + "attention.head_count");
  c.kv_heads = from.count(at + "attention.head_count_kv", c.heads);
  c.dim = from.count(at + "attention.key_length", c.hidden / c.heads);
  c.vocab = from.rows("token_embd.weight");
  c.max_positions = from.count(at + "context_length");
  c.norm_epsilon = static_cast<float>(from.number(at + "attention.layer_norm_rms_epsilon"));
  c.tied = !from.has_tensor("output.weight");
  c.qkv_bias = from.has_tensor("blk.0.attn_q.bias");
  c.o_bias = from.has_tensor("blk.0.attn_output.bias");
  const double base = from.number(at + "rope.freq_base", 10'000);
  if (!(base > 1 && std::isfinite(base))) {
    from.refuse("rope.freq_base: expected a base above 1, got ", base);
  }
  c.rope = kvmeld::rotary::halves(base);
  c.qk_norm = from.has_tensor("blk.0.attn_q_norm.weight");
  if (is_gemma) {
    read_gemma(from, at, name == "gemma3", c);
  }
  if (c.heads % c.kv_heads != 0) {
    from.refuse("expected a multiple of the KV heads, got ", c.heads, " heads for ", c.kv_heads,
                " KV heads");
  }
  if (c.dim == 0 || c.dim % 2 != 0 || from.count(at + "attention.value_length", c.dim) != c.dim ||
      from.count(at + "rope.dimension_count", c.dim) != c.dim) {
    from.refuse(
        "expected an even head dim, the same for keys and values and all of it rotated by "
        "RoPE, got another size");
  }
  const std::string scaling = at + "rope.scaling.type";
  if ((from.has(scaling) && from.word(scaling) != "none") ||
      from.number(at + "rope.scaling.factor", 1) != 1) {
    from.refuse("expected RoPE without scaling or with Llama 3's, got another scaling");
  }
  if (from.has_tensor("rope_freqs.weight")) {
    const auto factors = from.vector("rope_freqs.weight", c.dim / 2);
    const auto scaled = llama3_of(c.rope, factors.data(), c.dim);
    if (!scaled) {
      from.refuse("rope_freqs.weight: expected the factors of Llama 3.1 or 3.2, got others");
    }
    c.rope = *scaled;
  }
  return a;
}

/// Pairs `(2i, 2i + 1)` of each head's rows become `(i, i + dim/2)`.
void part_pairs(linear& l, index_t dim) {
  const linear adjacent = l;
  for (Eigen::Index r = 0; r < l.weight.rows(); ++r) {
    const Eigen::Index i = r % dim, half = dim / 2,
                       source = r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
    l.weight.row(r) = adjacent.weight.row(source);
    if (l.bias.size() > 0) {
      l.bias[r] = adjacent.bias[source];
    }
  }
}

weights load_weights(const file& from, const architecture& a) {
  constexpr tensor_names names = {
      "token_embd",   "output_norm", "output",      "blk.",
      "attn_norm",    "ffn_norm",    "attn_q",      "attn_k",
      "attn_v",       "attn_output", "ffn_gate",    "ffn_up",
      "ffn_down",     "attn_q_norm", "attn_k_norm", "post_attention_norm",
      "post_ffw_norm"};
  const config& c = a.shape;
  weights w = read_weights(from, c, names);
  for (layer_weights& l : w.layers) {
    if (a.adjacent_pairs) {
      part_pairs(l.q, c.dim), part_pairs(l.k, c.dim);
    }
  }
  const std::size_t of_layer =
      9 + (c.qkv_bias ? 3 : 0) + (c.o_bias ? 1 : 0) + (c.qk_norm ? 2 : 0) + (c.post_norms ? 2 : 0);
  from.expect_tensors(w.layers.size() * of_layer + (c.tied ? 2 : 3) +
                      (from.has_tensor("rope_freqs.weight") ? 1 : 0));
  return w;
}

}  // namespace
}  // namespace gguf

model load_gguf(const std::filesystem::path& path) {
  const gguf::file from(path);
  const auto a = gguf::read_architecture(from);
  decoder network(a.shape, gguf::load_weights(from, a));
  auto codec = gguf::vocabulary_of(path);
  if (codec && codec->size() > a.shape.vocab) {
    from.refuse("expected at most ", a.shape.vocab, " tokens (the rows of token_embd.weight), got ",
                codec->size());
  }
  if (!codec && a.shape.vocab != 256) {
    from.refuse("expected a vocabulary, or 256 tokens (bytes) without one, got ", a.shape.vocab,
                " tokens");
  }
  return {std::move(network), tokenizer(codec ? std::move(codec) : byte_codec())};
}

}  // namespace engine
