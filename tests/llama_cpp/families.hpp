// SPDX-License-Identifier: MIT
// Random models of other families than llama, as GGUF files; and llama.cpp's own attention
// with slots hidden head by head, which compression by eviction is held to.
#pragma once

#include <set>

#include "llama_cpp/files.hpp"

namespace test {

/// What a family's layers have in addition to llama's; 4 of them, 4 query heads on 2 KV heads
/// of 16.
struct family {
  std::string arch;
  index_t window = 0;   ///< of layers 0 and 2
  bool normed = false;  ///< queries and keys
  bool framed = false;  ///< norms after attention and the feed-forward part, tied embeddings
  bool experts = false;
  bool sinks = false;
  std::vector<std::pair<std::string, float>> numbers = {};  ///< of its own metadata
  std::string scaling = {};

  static constexpr index_t layers = 4, heads = 4, kv_heads = 2, dim = 16, hidden = 64, inner = 96,
                           vocab = 256, expert_count = 4;
  bool windowed(index_t l) const { return window > 0 && l % 2 == 0; }
};

inline std::vector<family> families() {
  return {{.arch = "gemma3",
           .window = 32,
           .normed = true,
           .framed = true,
           .numbers = {{"rope.freq_base_swa", 100}}},
          {.arch = "gemma2",
           .window = 32,
           .framed = true,
           .numbers = {{"attn_logit_softcapping", 4}, {"final_logit_softcapping", 30}}},
          {.arch = "gpt-oss", .window = 32, .experts = true, .sinks = true},
          {.arch = "cohere2", .window = 32, .numbers = {{"logit_scale", 0.5F}}},
          {.arch = "qwen3", .normed = true},
          {.arch = "smollm3"},
          {.arch = "qwen3",
           .normed = true,
           .numbers = {{"rope.scaling.factor", 4}},
           .scaling = "yarn"}};
}

/// A random model's tensors, drawn in the order in which they are written.
class family_file {
 public:
  family_file(const family& f, unsigned seed) : f_(f), bits_(seed) {
    const auto count = [&](const char* key, index_t n) {
      gguf_set_val_u32(out_, (f.arch + "." + key).c_str(), static_cast<std::uint32_t>(n));
    };
    gguf_set_val_str(out_, "general.architecture", f.arch.c_str());
    gguf_set_val_str(out_, "tokenizer.ggml.model", "no_vocab");
    count("vocab_size", family::vocab), count("context_length", 4096);
    count("embedding_length", family::hidden), count("block_count", family::layers);
    count("feed_forward_length", family::inner);
    count("attention.head_count", family::heads),
        count("attention.head_count_kv", family::kv_heads);
    count("attention.key_length", family::dim), count("attention.value_length", family::dim);
    count("rope.dimension_count", family::dim);
    if (f.window > 0) {
      count("attention.sliding_window", f.window), count("attention.sliding_window_pattern", 2);
    }
    if (f.experts) {
      // All of them: rounding would decide between two alike.
      count("expert_count", family::expert_count);
      count("expert_used_count", family::expert_count);
      count("expert_feed_forward_length", family::inner);
    }
    if (!f.scaling.empty()) {
      gguf_set_val_str(out_, (f.arch + ".rope.scaling.type").c_str(), f.scaling.c_str());
      count("rope.scaling.original_context_length", 1024);
    }
    number("rope.freq_base", 10'000);
    number(
        f.arch == "cohere2" ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon",
        1e-5F);
    for (const auto& [key, x] : f.numbers) {
      number(key, x);
    }
    matrix("token_embd.weight", family::vocab, family::hidden, 1);
    vector("output_norm.weight", family::hidden, 1, 0);
    if (!f.framed && f.arch != "cohere2") {
      matrix("output.weight", family::vocab, family::hidden, 0.1F);
    }
    for (index_t l = 0; l < family::layers; ++l) {
      layer("blk." + std::to_string(l) + ".");
    }
  }
  ~family_file() { gguf_free(out_), ggml_free(memory_); }
  family_file(const family_file&) = delete;
  family_file& operator=(const family_file&) = delete;

  void write(const std::filesystem::path& path) const {
    gguf_write_to_file(out_, path.string().c_str(), false);
  }

 private:
  void number(const std::string& key, float x) {
    gguf_set_val_f32(out_, (f_.arch + "." + key).c_str(), x);
  }
  void fill(const std::string& name, ggml_tensor* t, float mean, float size) {
    std::normal_distribution<float> normal(mean, size);
    for (std::int64_t i = 0; i < ggml_nelements(t); ++i) {
      static_cast<float*>(t->data)[i] = size > 0 ? normal(bits_) : mean;
    }
    ggml_set_name(t, name.c_str());
    gguf_add_tensor(out_, t);
  }
  void vector(const std::string& name, index_t n, float mean, float size) {
    fill(name, ggml_new_tensor_1d(memory_, GGML_TYPE_F32, n), mean, size);
  }
  void matrix(const std::string& name, index_t rows, index_t columns, float size, index_t of = 1) {
    fill(name,
         of == 1 ? ggml_new_tensor_2d(memory_, GGML_TYPE_F32, columns, rows)
                 : ggml_new_tensor_3d(memory_, GGML_TYPE_F32, columns, rows, of),
         0, size);
  }
  void layer(const std::string& at) {
    constexpr index_t queries = family::heads * family::dim, keys = family::kv_heads * family::dim;
    vector(at + "attn_norm.weight", family::hidden, 1, 0);
    matrix(at + "attn_q.weight", queries, family::hidden, 0.25F);
    matrix(at + "attn_k.weight", keys, family::hidden, 0.25F);
    matrix(at + "attn_v.weight", keys, family::hidden, 0.25F);
    matrix(at + "attn_output.weight", family::hidden, queries, 0.25F);
    if (f_.normed) {
      vector(at + "attn_q_norm.weight", family::dim, 1.5F, 0.2F);
      vector(at + "attn_k_norm.weight", family::dim, 1.5F, 0.2F);
    }
    if (f_.sinks) {
      vector(at + "attn_sinks.weight", family::heads, 1.5F, 0.5F);
      vector(at + "attn_output.bias", family::hidden, 0, 0.1F);
    }
    if (f_.framed || f_.experts) {
      vector(at + "post_attention_norm.weight", family::hidden, 1, 0);
    }
    if (f_.framed) {
      vector(at + "post_ffw_norm.weight", family::hidden, 1, 0);
    }
    if (!f_.experts && f_.arch != "cohere2") {
      vector(at + "ffn_norm.weight", family::hidden, 1, 0);
    }
    const index_t of = f_.experts ? family::expert_count : 1;
    const std::string kind = f_.experts ? "_exps" : "";
    for (const auto& [part, rows, columns] : {std::tuple{"gate", family::inner, family::hidden},
                                              {"up", family::inner, family::hidden},
                                              {"down", family::hidden, family::inner}}) {
      matrix(at + "ffn_" + part + kind + ".weight", rows, columns, 0.2F, of);
      if (f_.experts) {
        fill(at + "ffn_" + part + kind + ".bias",
             ggml_new_tensor_2d(memory_, GGML_TYPE_F32, rows, of), 0, 0.1F);
      }
    }
    if (f_.experts) {
      matrix(at + "ffn_gate_inp.weight", of, family::hidden, 0.2F);
      vector(at + "ffn_gate_inp.bias", of, 0, 0.1F);
    }
  }

  const family& f_;
  std::mt19937 bits_;
  gguf_context* out_ = gguf_init_empty();
  ggml_context* memory_ = ggml_init({std::size_t{64} << 20, nullptr, false});
};

inline llama_model_ptr random_model(const family& f, unsigned seed = 7) {
  const temporary_folder folder;
  family_file(f, seed).write(folder.path() / "model.gguf");
  auto model = load_gguf(folder.path() / "model.gguf");
  REQUIRE(model != nullptr);
  return model;
}

/// llama.cpp's own attention over all of its cells, of which heads see no others than they are
/// told.
class masked_llama {
 public:
  explicit masked_llama(llama_model* model, index_t cells, index_t chunk) {
    auto p = exact_parameters(cells, chunk);
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.cb_eval = on_node;
    p.cb_eval_user_data = this;
    context_.reset(llama_init_from_model(model, p));
    REQUIRE(context_ != nullptr);
  }

  /// From now on query heads of KV head `h` of layer `l` see the tokens at `positions`, and those
  /// that come after the present ones.
  void keep(index_t l, index_t h, std::set<index_t> positions) {
    hidden_[{l, h}].clear();
    for (index_t p = 0; p < position_; ++p) {
      if (!positions.contains(p)) {
        hidden_[{l, h}].push_back(p);
      }
    }
  }
  engine::row_major_matrix decode(std::span<const int> tokens) {
    auto logits = test::decode(context_.get(), tokens, position_);
    position_ += static_cast<index_t>(tokens.size());
    return logits;
  }

 private:
  /// Nothing is freed: cells are positions. A hidden one has a logit of -inf, behind a cap.
  static bool on_node(ggml_tensor* t, bool ask, void* self) {
    const auto& m = *static_cast<masked_llama*>(self);
    const std::string_view name = t->name;
    const auto l = std::max(kvmeld::llama::number_behind("kq-", name),
                            kvmeld::llama::number_behind("kq_scaled_2-", name));
    if (ask || l < 0) {
      return l >= 0 || !ask;
    }
    for (const auto& [at, positions] : m.hidden_) {
      const std::int64_t group = t->ne[2] / family::kv_heads;
      for (std::int64_t g = at.second * group; at.first == l && g < (at.second + 1) * group; ++g) {
        for (std::int64_t i = 0; i < t->ne[1]; ++i) {
          for (const index_t p : positions) {
            *kvmeld::llama::element(t, p, i, g) = -std::numeric_limits<float>::infinity();
          }
        }
      }
    }
    return true;
  }

  std::map<std::pair<index_t, index_t>, std::vector<index_t>> hidden_;
  llama_context_ptr context_;
  index_t position_ = 0;
};

}  // namespace test
