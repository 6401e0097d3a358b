// SPDX-License-Identifier: MIT
// Random models as GGUF files, written through gguf's own C API, and llama.cpp driven chunk by
// chunk.
#pragma once

#include <ggml-cpu.h>
#include <gguf.h>
#include <llama-cpp.h>

#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/test_files.hpp"
#include "llama_cpp/llama_cpp.hpp"
#include "llama_cpp/own_engine.hpp"

namespace kvmeld::llama {

extern template class compressor<evaluate::any_policy>;  // the adapter's compressor.cpp compiles it

}  // namespace kvmeld::llama

namespace test {

/// Weights drawn at random, at sizes that make attention matter.
inline engine::weights draw_weights(const engine::config& c, unsigned seed) {
  std::mt19937 bits(seed);
  const auto draw = [&](index_t out, index_t in, float size) {
    engine::linear l;
    std::normal_distribution<float> normal(0, size);
    l.weight.resize(out, in);
    for (Eigen::Index i = 0; i < l.weight.size(); ++i) {
      l.weight.data()[i] = normal(bits);
    }
    return l;
  };
  engine::weights w;
  w.embedding = draw(c.vocab, c.hidden, 1);
  w.norm = engine::row_vector::Ones(c.hidden);
  w.output = draw(c.vocab, c.hidden, 0.1F);
  for (index_t l = 0; l < c.layers; ++l) {
    engine::layer_weights layer;
    layer.attention_norm = layer.mlp_norm = engine::row_vector::Ones(c.hidden);
    layer.q = draw(c.heads * c.dim, c.hidden, 0.25F);
    layer.k = draw(c.kv_heads * c.dim, c.hidden, 0.25F);
    layer.v = draw(c.kv_heads * c.dim, c.hidden, 0.25F);
    if (c.qkv_bias) {
      for (engine::linear* part : {&layer.q, &layer.k, &layer.v}) {
        part->bias = draw(1, static_cast<index_t>(part->weight.rows()), 1).weight.row(0);
      }
    }
    layer.o = draw(c.hidden, c.heads * c.dim, 0.25F);
    layer.gate = draw(c.intermediate, c.hidden, 0.2F);
    layer.up = draw(c.intermediate, c.hidden, 0.2F);
    layer.down = draw(c.hidden, c.intermediate, 0.2F);
    w.layers.push_back(std::move(layer));
  }
  return w;
}

/// Called with the file before it is written, to add what a test wants refused.
using gguf_edit = std::function<void(gguf_context*)>;

/// Writes a llama of these weights; `arch` names another architecture. Pairs of a rotation are
/// adjacent in a llama's file, half a head apart in an exaone's and a qwen2's. Llama 3's scaling
/// becomes factors.
inline void write_gguf(const std::filesystem::path& path, const engine::config& c,
                       const engine::weights& w, const gguf_edit& edit = {},
                       const std::string& arch = "llama") {
  const auto name = [&](const char* key) { return arch + "." + key; };
  gguf_context* const out = gguf_init_empty();
  gguf_set_val_str(out, "general.architecture", arch.c_str());
  const auto count = [&](const char* key, index_t n) {
    gguf_set_val_u32(out, name(key).c_str(), static_cast<std::uint32_t>(n));
  };
  count("vocab_size", c.vocab), count("context_length", c.max_positions);
  count("embedding_length", c.hidden), count("block_count", c.layers);
  count("feed_forward_length", c.intermediate);
  count("attention.head_count", c.heads), count("attention.head_count_kv", c.kv_heads);
  count("attention.key_length", c.dim), count("attention.value_length", c.dim);
  count("rope.dimension_count", c.dim);
  gguf_set_val_f32(out, name("rope.freq_base").c_str(), static_cast<float>(c.rope.base()));
  gguf_set_val_f32(out, name("attention.layer_norm_rms_epsilon").c_str(), c.norm_epsilon);
  gguf_set_val_str(out, "tokenizer.ggml.model", "no_vocab");
  if (edit) {
    edit(out);
  }
  ggml_context* const memory = ggml_init({std::size_t{64} << 20, nullptr, false});
  const bool adjacent = arch != "exaone" && arch != "qwen2";
  const auto add = [&](const std::string& tensor, const auto& x, index_t heads = 0) {
    const auto rows = x.rows(), columns = x.cols();
    ggml_tensor* const t = rows == 1 || columns == 1
                               ? ggml_new_tensor_1d(memory, GGML_TYPE_F32, rows * columns)
                               : ggml_new_tensor_2d(memory, GGML_TYPE_F32, columns, rows);
    auto* const to = static_cast<float*>(t->data);
    for (Eigen::Index r = 0; r < rows; ++r) {
      Eigen::Index from = r;
      if (heads > 0 && adjacent) {  // pairs (i, i + d/2) → (2i, 2i + 1)
        const Eigen::Index dim = rows / heads, i = r % dim;
        from = r - i + i / 2 + (i % 2) * (dim / 2);
      }
      for (Eigen::Index i = 0; i < columns; ++i) {
        to[r * columns + i] = x(from, i);
      }
    }
    ggml_set_name(t, tensor.c_str());
    gguf_add_tensor(out, t);
  };
  add("token_embd.weight", w.embedding.weight), add("output_norm.weight", w.norm);
  add("output.weight", w.output.weight);
  if (c.rope != kvmeld::rotary::halves(c.rope.base())) {
    engine::row_vector factors(c.dim / 2);
    for (index_t p = 0; p < c.dim / 2; ++p) {
      const double plain = std::pow(c.rope.base(), -2.0 * p / c.dim);
      factors[p] = static_cast<float>(plain / c.rope.frequency(p, c.dim));
    }
    add("rope_freqs.weight", factors);
  }
  for (index_t l = 0; l < c.layers; ++l) {
    const auto& from = w.layers[static_cast<std::size_t>(l)];
    const std::string at = "blk." + std::to_string(l) + ".";
    add(at + "attn_norm.weight", from.attention_norm), add(at + "ffn_norm.weight", from.mlp_norm);
    add(at + "attn_q.weight", from.q.weight, c.heads);
    add(at + "attn_k.weight", from.k.weight, c.kv_heads);
    if (c.qkv_bias) {
      add(at + "attn_q.bias", from.q.bias.transpose(), c.heads);
      add(at + "attn_k.bias", from.k.bias.transpose(), c.kv_heads);
      add(at + "attn_v.bias", from.v.bias.transpose());
    }
    add(at + "attn_v.weight", from.v.weight), add(at + "attn_output.weight", from.o.weight);
    add(at + "ffn_gate.weight", from.gate.weight), add(at + "ffn_up.weight", from.up.weight);
    add(at + "ffn_down.weight", from.down.weight);
  }
  gguf_write_to_file(out, path.string().c_str(), false);
  gguf_free(out);
  ggml_free(memory);
}

inline llama_model_ptr load_gguf(const std::filesystem::path& path) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto parameters = llama_model_default_params();
  parameters.n_gpu_layers = 0;
  return llama_model_ptr(llama_model_load_from_file(path.string().c_str(), parameters));
}

/// A random model, in both engines.
struct twin {
  explicit twin(unsigned seed = 7, engine::config c = small_shape(), const gguf_edit& edit = {},
                const std::string& arch = "llama")
      : shape(c), ours(c, draw_weights(c, seed)) {
    write_gguf(folder.path() / "twin.gguf", c, draw_weights(c, seed), edit, arch);
    theirs = load_gguf(folder.path() / "twin.gguf");
    REQUIRE(theirs != nullptr);
  }
  temporary_folder folder;
  engine::config shape;
  engine::decoder ours;
  llama_model_ptr theirs;
};

inline llama_context_params exact_parameters(index_t cells, index_t chunk) {
  auto p = llama_context_default_params();
  p.n_ctx = static_cast<std::uint32_t>(cells);
  p.n_batch = p.n_ubatch = static_cast<std::uint32_t>(chunk);
  p.type_k = p.type_v = GGML_TYPE_F32;
  p.n_threads = p.n_threads_batch = 1;
  return p;
}

/// Decodes `tokens` of a sequence at positions `first` and on. `[tokens, vocab]`, or nothing where
/// it failed.
inline engine::row_major_matrix decode(llama_context* context, std::span<const int> tokens,
                                       index_t first, int* code = nullptr,
                                       llama_seq_id sequence = 0) {
  llama_batch batch = llama_batch_init(static_cast<int>(tokens.size()), 0, 1);
  batch.n_tokens = static_cast<int>(tokens.size());
  for (int i = 0; i < batch.n_tokens; ++i) {
    batch.token[i] = tokens[static_cast<std::size_t>(i)];
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = sequence;
    batch.logits[i] = 1;
  }
  const int result = llama_decode(context, batch);
  llama_batch_free(batch);
  if (code != nullptr) {
    *code = result;
  }
  engine::row_major_matrix logits;
  if (result == 0) {
    const auto vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    logits.resize(static_cast<Eigen::Index>(tokens.size()), vocab);
    for (Eigen::Index i = 0; i < logits.rows(); ++i) {
      std::copy_n(llama_get_logits_ith(context, static_cast<int>(i)), vocab, logits.row(i).data());
    }
  }
  return logits;
}

/// llama.cpp behind the adapter.
struct compressed_llama {
  compressed_llama(llama_model* model, const evaluate::any_policy& p, kvmeld::llama::options o,
                   llama_context_params parameters)
      : kv(model, p, std::move(o)) {
    kv.attach(parameters);
    context.reset(llama_init_from_model(model, parameters));
    REQUIRE(context != nullptr);
    kv.bind(context.get());
  }
  engine::row_major_matrix decode(std::span<const int> tokens) {
    int code = 0;
    auto logits = test::decode(context.get(), tokens, position, &code);
    kv.check();
    REQUIRE(code == 0);
    position += static_cast<index_t>(tokens.size());
    return logits;
  }
  kvmeld::llama::compressor<evaluate::any_policy> kv;
  llama_context_ptr context;
  index_t position = 0;
};

/// A whole text, in batches of `batch`.
inline std::vector<engine::row_major_matrix> run(compressed_llama& kv, const std::vector<int>& text,
                                                 index_t batch = 64) {
  std::vector<engine::row_major_matrix> all;
  for (std::size_t at = 0; at < text.size(); at += static_cast<std::size_t>(batch)) {
    all.push_back(kv.decode(std::span(text).subspan(
        at, std::min<std::size_t>(static_cast<std::size_t>(batch), text.size() - at))));
  }
  return all;
}

/// `count` of them in random order, all different while there are more: the same token twice has
/// the same first keys, and rounding would decide between them.
inline std::vector<int> draw_tokens(index_t count, index_t vocab, unsigned seed = 3) {
  std::vector<int> all(static_cast<std::size_t>(vocab)), tokens;
  std::iota(all.begin(), all.end(), 0);
  std::mt19937 bits(seed);
  while (static_cast<index_t>(tokens.size()) < count) {
    for (std::size_t n = all.size(); n > 1; --n) {
      std::swap(all[n - 1], all[bits() % n]);
    }
    tokens.insert(tokens.end(), all.begin(), all.end());
  }
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

inline float difference(const engine::row_major_matrix& a, const engine::row_major_matrix& b) {
  REQUIRE((a.rows() == b.rows() && a.cols() == b.cols()));
  return (a - b).cwiseAbs().maxCoeff();
}

/// The largest difference of two runs, batch by batch.
inline float apart(const std::vector<engine::row_major_matrix>& a,
                   const std::vector<engine::row_major_matrix>& b) {
  REQUIRE(a.size() == b.size());
  float most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, difference(a[i], b[i]));
  }
  return most;
}

}  // namespace test
