// SPDX-License-Identifier: MIT
// Models and policies that do not go with the adapter, as real files: refused in one line, by name.
#include <catch2/catch.hpp>

#include "llama_cpp/announced.hpp"

namespace other_models_test {

using namespace test;
using Catch::Contains;

constexpr index_t hidden = 64, inner = 96, vocab = 256, layers = 2, heads = 4, dim = 16;

/// A random model of any architecture, tensor by tensor.
class model_file {
 public:
  explicit model_file(std::string arch) : arch_(std::move(arch)) {
    gguf_set_val_str(out_, "general.architecture", arch_.c_str());
    gguf_set_val_str(out_, "tokenizer.ggml.model", "no_vocab");
    gguf_set_val_f32(out_, (arch_ + ".attention.layer_norm_rms_epsilon").c_str(), 1e-5F);
    numbers({{"vocab_size", vocab},
             {"context_length", 4096},
             {"embedding_length", hidden},
             {"block_count", layers},
             {"feed_forward_length", inner},
             {"attention.head_count", heads}});
    tensor("token_embd.weight", {hidden, vocab});
  }
  ~model_file() { gguf_free(out_), ggml_free(memory_); }
  model_file(const model_file&) = delete;
  model_file& operator=(const model_file&) = delete;

  void numbers(const std::vector<std::pair<std::string, index_t>>& all) {
    for (const auto& [key, n] : all) {
      gguf_set_val_u32(out_, (arch_ + "." + key).c_str(), static_cast<std::uint32_t>(n));
    }
  }
  void list(const std::string& key, const std::vector<std::uint32_t>& all) {
    gguf_set_arr_data(out_, (arch_ + "." + key).c_str(), GGUF_TYPE_UINT32, all.data(), all.size());
  }
  void tensor(const std::string& name, const std::vector<std::int64_t>& shape) {
    ggml_tensor* const t =
        ggml_new_tensor(memory_, GGML_TYPE_F32, static_cast<int>(shape.size()), shape.data());
    for (std::int64_t i = 0; i < ggml_nelements(t); ++i) {
      static_cast<float*>(t->data)[i] = 0.1F * static_cast<float>(bits_() % 7) - 0.3F;
    }
    ggml_set_name(t, name.c_str());
    gguf_add_tensor(out_, t);
  }
  void feed_forward(const std::string& at) {
    tensor(at + "ffn_norm.weight", {hidden});
    tensor(at + "ffn_gate.weight", {hidden, inner}), tensor(at + "ffn_up.weight", {hidden, inner});
    tensor(at + "ffn_down.weight", {inner, hidden});
  }
  llama_model_ptr load() const {
    const temporary_folder folder;
    const auto path = folder.path() / "model.gguf";
    gguf_write_to_file(out_, path.string().c_str(), false);
    auto model = load_gguf(path);
    REQUIRE(model != nullptr);
    return model;
  }

 private:
  std::string arch_;
  std::mt19937 bits_{5};
  gguf_context* out_ = gguf_init_empty();
  ggml_context* memory_ = ggml_init({std::size_t{16} << 20, nullptr, false});
};

/// DeepSeek-V3's attention, absorbed: 4 heads on one latent row of 32 numbers and 8 rotated ones.
llama_model_ptr deepseek() {
  constexpr index_t latent = 32, turned = 8, low = 24;
  model_file f("deepseek2");
  f.numbers({{"attention.head_count_kv", 1},
             {"attention.q_lora_rank", low},
             {"attention.kv_lora_rank", latent},
             {"attention.key_length", latent + turned},
             {"attention.value_length", latent},
             {"attention.key_length_mla", dim + turned},
             {"attention.value_length_mla", dim},
             {"rope.dimension_count", turned},
             {"leading_dense_block_count", layers},
             {"expert_feed_forward_length", inner},
             {"expert_shared_count", 0}});
  f.tensor("output_norm.weight", {hidden});
  for (index_t l = 0; l < layers; ++l) {
    const std::string at = "blk." + std::to_string(l) + ".";
    f.tensor(at + "attn_norm.weight", {hidden}), f.tensor(at + "attn_q_a_norm.weight", {low});
    f.tensor(at + "attn_kv_a_norm.weight", {latent});
    f.tensor(at + "attn_q_a.weight", {hidden, low});
    f.tensor(at + "attn_q_b.weight", {low, heads * (dim + turned)});
    f.tensor(at + "attn_kv_a_mqa.weight", {hidden, latent + turned});
    f.tensor(at + "attn_k_b.weight", {dim, latent, heads});
    f.tensor(at + "attn_v_b.weight", {latent, dim, heads});
    f.tensor(at + "attn_output.weight", {heads * dim, hidden});
    f.feed_forward(at);
  }
  return f.load();
}

/// LFM2: a convolution in the first layer, attention in the second.
llama_model_ptr lfm2() {
  constexpr index_t kv_heads = 2, taps = 3;
  model_file f("lfm2");
  f.list("attention.head_count_kv", {0, kv_heads});
  f.numbers({{"shortconv.l_cache", taps}, {"rope.dimension_count", dim}});
  f.tensor("token_embd_norm.weight", {hidden});
  f.tensor("blk.0.shortconv.conv.weight", {taps, hidden});
  f.tensor("blk.0.shortconv.in_proj.weight", {hidden, 3 * hidden});
  f.tensor("blk.0.shortconv.out_proj.weight", {hidden, hidden});
  f.tensor("blk.1.attn_q.weight", {hidden, heads * dim});
  f.tensor("blk.1.attn_k.weight", {hidden, kv_heads * dim});
  f.tensor("blk.1.attn_v.weight", {hidden, kv_heads * dim});
  f.tensor("blk.1.attn_q_norm.weight", {dim}), f.tensor("blk.1.attn_k_norm.weight", {dim});
  f.tensor("blk.1.attn_output.weight", {heads * dim, hidden});
  for (const std::string at : {"blk.0.", "blk.1."}) {
    f.tensor(at + "attn_norm.weight", {hidden});
    f.feed_forward(at);
  }
  return f.load();
}

TEST_CASE("llama.cpp: random MLA and hybrid models, which llama.cpp runs, are refused by name") {
  const auto refused = [](const llama_model_ptr& model) {
    const llama_context_ptr context(llama_init_from_model(model.get(), exact_parameters(256, 64)));
    REQUIRE(context != nullptr);
    REQUIRE(decode(context.get(), draw_tokens(8, vocab), 0).allFinite());
    try {
      kvmeld::llama::compressor<evaluate::any_policy>(model.get(), policy_named("h2o"),
                                                      {.limits = {{.slots = 48}}});
    } catch (const kvmeld::error& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  CHECK_THAT(refused(deepseek()),
             Contains("expected a model that can be compressed, got deepseek2 with MLA: its keys "
                      "and values are one latent row"));
  CHECK_THAT(refused(lfm2()), Contains("expected a model that can be compressed, got lfm2 with "
                                       "hybrid memory: attention and recurrent layers"));
}

TEST_CASE("llama.cpp: a policy is refused on a model whose attention it does not go with") {
  for (const family& f : families()) {
    const bool capped = f.arch == "gemma2";
    const auto model = random_model(f);
    const auto text = draw_tokens(64, family::vocab);
    for (const mode how : {mode::repack, mode::own_attention}) {
      for (const std::string policy : {"expected_attention", "h2o", "d2o", "fold"}) {
        CAPTURE(f.arch, how, policy);
        compressed_llama kv(model.get(), policy_named(policy),
                            {.how = how, .limits = {{.slots = 48}}}, exact_parameters(256, 64));
        int code = 0;
        decode(kv.context.get(), text, 0, &code);
        if (policy != "expected_attention" || !capped) {
          CHECK_NOTHROW(kv.kv.check());
          CHECK(code == 0);
          continue;
        }
        CHECK(code == 2);
        CHECK_THROWS_WITH(kv.kv.check(),
                          Contains("expected_attention: expected attention without soft_cap (its "
                                   "estimate is of plain logits), got some"));
        CHECK(kv.kv.report().slots == 0);
      }
    }
  }
}

}  // namespace other_models_test
