// SPDX-License-Identifier: MIT
// GGUF files in our own engine: llama.cpp's logits and tokens on the same file, and refusals.
#include <catch2/catch.hpp>

#include "engine/model.hpp"
#include "llama_cpp/bundled.hpp"
#include "llama_cpp/families.hpp"
#include "llama_cpp/streams.hpp"

namespace gguf_test {

using namespace test;

/// Of both engines' logits on the same tokens.
struct distance {
  float most = 0;  ///< largest difference
  float size = 0;  ///< largest logit
  double kl = 0;   ///< mean KL divergence of the next token's distribution, nats
};

double kl_divergence(const Eigen::ArrayXd& p, const Eigen::ArrayXd& q) {
  const auto logs = [](const Eigen::ArrayXd& x) {
    return Eigen::ArrayXd(x - x.maxCoeff() - std::log((x - x.maxCoeff()).exp().sum()));
  };
  const Eigen::ArrayXd log_p = logs(p), log_q = logs(q);
  return (log_p.exp() * (log_p - log_q)).sum();
}

distance distance_of(const engine::decoder& ours, llama_model* theirs,
                     std::span<const int> tokens) {
  auto parameters = exact_parameters(static_cast<index_t>(tokens.size()), 256);
  parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const llama_context_ptr context(llama_init_from_model(theirs, parameters));
  REQUIRE(context != nullptr);
  const auto all = full_logits(ours, tokens);
  distance d{.size = all.cwiseAbs().maxCoeff()};
  for (std::size_t at = 0; at < tokens.size(); at += 256) {
    const auto part = tokens.subspan(at, std::min<std::size_t>(256, tokens.size() - at));
    const auto rows = decode(context.get(), part, static_cast<index_t>(at));
    const auto first = static_cast<Eigen::Index>(at);
    d.most = std::max(d.most, difference(rows, all.middleRows(first, rows.rows())));
    for (Eigen::Index r = 0; r < rows.rows(); ++r) {
      d.kl += kl_divergence(rows.row(r).cast<double>(), all.row(first + r).cast<double>()) /
              static_cast<double>(tokens.size());
    }
  }
  return d;
}

/// Where examples/run puts the model.
std::filesystem::path smollm2() {
  return paths::source("build/models/SmolLM2-135M-Instruct.Q4_1.gguf");
}

void convert(const std::filesystem::path& from, const std::filesystem::path& to, llama_ftype type) {
  auto parameters = llama_model_quantize_default_params();
  parameters.ftype = type;
  parameters.allow_requantize = true;
  parameters.nthread = 1;
  REQUIRE(llama_model_quantize(from.string().c_str(), to.string().c_str(), &parameters) == 0);
}

/// `file` in both engines. Where weights are quantised, llama.cpp rounds activations to 8 bits;
/// with the same weights as floats it does not.
void expect_same_logits(const std::filesystem::path& file, std::span<const int> tokens,
                        float tolerance, double kl) {
  const temporary_folder folder;
  convert(file, folder.path() / "floats.gguf", LLAMA_FTYPE_ALL_F32);
  const auto ours = engine::model::load(file);
  const auto floats =
      distance_of(ours.network, load_gguf(folder.path() / "floats.gguf").get(), tokens);
  const auto rounded = distance_of(ours.network, load_gguf(file).get(), tokens);
  CAPTURE(floats.most, floats.size, floats.kl, rounded.most, rounded.kl);
  CHECK(floats.most < tolerance);
  CHECK(floats.size > 5);
  CHECK(rounded.kl < kl);
}

TEST_CASE("gguf: the bundled model's logits and tokens are llama.cpp's, whatever its tensors are") {
  const bundled m;
  const temporary_folder folder;
  const auto text = m.text().substr(0, 1500);
  const auto plain = engine::model::load(paths::gguf());
  const auto tokens = plain.tokens.encode(text);
  const auto part = std::span(tokens).first(300);
  CHECK(tokens == m.tokens.encode(text));
  CHECK(plain.tokens.decode(tokens) == text);
  for (const char* piece : {" of Mirola\nis ", "a", " a", "\nQuestion:", ""}) {
    CHECK(plain.tokens.encode_fragment(piece) == m.tokens.encode_fragment(piece));
  }
  CHECK(difference(full_logits(plain.network, part), full_logits(m.ours, part)) == 0);
  for (const llama_ftype type :
       {LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_F16, LLAMA_FTYPE_MOSTLY_BF16,
        LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_1, LLAMA_FTYPE_MOSTLY_Q4_K_M,
        LLAMA_FTYPE_MOSTLY_Q6_K}) {
    CAPTURE(type);
    convert(paths::gguf(), folder.path() / "q.gguf", type);
    expect_same_logits(folder.path() / "q.gguf", part, 1e-4F, 0.01);
  }
}

TEST_CASE("gguf: SmolLM2's logits are llama.cpp's, and its text comes back as it was") {
  const auto file = smollm2();
  if (!std::filesystem::exists(file)) {
    WARN("not fetched: bash examples/run --model smollm2");
    return;
  }
  const auto ours = engine::model::load(file);
  const std::string text = bundled::text().substr(0, 2000);
  const auto tokens = ours.tokens.encode(text);
  CHECK(ours.tokens.decode(tokens) == text);
  CHECK(ours.tokens.encode_fragment(text) == tokens);
  // The template's names are tokens of their own, and text that looks like them is not.
  const auto turn = ours.tokens.chat().value();
  CHECK(turn.before.front() == 1);  // <|im_start|>
  CHECK(ours.tokens.decode(turn.before) == "user\n");
  CHECK(std::vector(turn.after.begin(), turn.after.begin() + 1) == std::vector{2});  // <|im_end|>
  CHECK(ours.tokens.decode(turn.after) == "\nassistant\n");
  CHECK(ours.tokens.encode_fragment("<|im_start|>").size() > 1);
  // Its second token's activations are so large that 8 bits of them are off by 3 nats.
  expect_same_logits(file, std::span(tokens).first(256), 1e-3F, 0.05);
}

TEST_CASE("gguf: random models of every shape that is read have llama.cpp's logits") {
  for (const char* arch : {"llama", "qwen2"}) {
    for (const bool biases : {false, true}) {
      for (const bool scaled : {false, true}) {
        if (scaled && arch == std::string("qwen2")) {
          continue;  // llama.cpp reads no factors there
        }
        CAPTURE(arch, biases, scaled);
        auto shape = small_shape();
        shape.vocab = 256;
        shape.qkv_bias = biases;
        if (scaled) {
          shape.rope = kvmeld::rotary::halves(500'000).llama3({.factor = 32});
        }
        const twin models(11, shape, {}, arch);
        const auto ours = engine::model::load(models.folder.path() / "twin.gguf");
        const auto tokens = draw_tokens(200, shape.vocab);
        const auto d = distance_of(ours.network, models.theirs.get(), tokens);
        CAPTURE(d.most, d.size);
        CHECK(d.most < 1e-4F);
        CHECK(d.size > 1);
      }
    }
  }
}

TEST_CASE("gguf: random models of other families have llama.cpp's logits") {
  for (const family& f : families()) {
    if (f.arch != "gemma2" && f.arch != "gemma3" && (f.arch != "qwen3" || !f.scaling.empty())) {
      continue;
    }
    CAPTURE(f.arch);
    const temporary_folder folder;
    family_file(f, 11).write(folder.path() / "model.gguf");
    const auto ours = engine::model::load(folder.path() / "model.gguf");
    const auto tokens = draw_tokens(200, family::vocab);
    const auto d = distance_of(ours.network, load_gguf(folder.path() / "model.gguf").get(), tokens);
    CAPTURE(d.most, d.size);
    CHECK(d.most < 3e-4F * d.size);  // ggml's GELU is a table of halves
    CHECK(d.size > 1);
  }
}

TEST_CASE("gguf: what the engine would get wrong is refused, by the file's name") {
  const auto refused = [](const gguf_edit& edit, const std::string& word,
                          const std::string& arch = "llama") {
    const temporary_folder folder;
    auto c = small_shape();
    c.vocab = 256;
    write_gguf(folder.path() / "bad.gguf", c, draw_weights(c, 1), edit, arch);
    expect_refusal("bad.gguf", {word}, [&] { engine::model::load(folder.path() / "bad.gguf"); });
  };
  const auto set = [](const char* key, auto x) {
    return [=](gguf_context* out) {
      if constexpr (std::is_same_v<decltype(x), float>) {
        gguf_set_val_f32(out, key, x);
      } else if constexpr (std::is_same_v<decltype(x), const char*>) {
        gguf_set_val_str(out, key, x);
      } else {
        gguf_set_val_u32(out, key, static_cast<std::uint32_t>(x));
      }
    };
  };
  refused(set("llama.rope.scaling.type", "yarn"), "scaling");
  refused(set("llama.rope.scaling.factor", 2.0F), "scaling");
  refused(set("llama.expert_count", 4), "llama.expert_count");
  refused(set("llama.rope.dimension_count", 4), "rotated by RoPE");
  refused(set("llama.attention.head_count", 3), "expected a multiple of the KV heads");
  refused(set("llama.attention.head_count", 2.0F), "expected one u32, got f32");
  refused(set("llama.feed_forward_length", 40), "blk.0.ffn_gate.weight");
  refused([](gguf_context* out) { gguf_remove_key(out, "llama.attention.layer_norm_rms_epsilon"); },
          "expected key \"llama.attention.layer_norm_rms_epsilon\"");
  refused(
      [](gguf_context* out) {
        ggml_context* const memory = ggml_init({1 << 16, nullptr, false});
        ggml_tensor* const norm = ggml_new_tensor_1d(memory, GGML_TYPE_F32, 8);
        ggml_set_name(norm, "blk.0.ffn_up.bias");
        gguf_add_tensor(out, norm);  // the file is written while the memory is there
      },
      "no MLP biases");
  refused({}, "got \"exaone\"", "exaone");

  const temporary_folder folder;
  for (const std::string bytes : {"", "GGUF", "no model at all"}) {
    folder.write("bad.gguf", bytes);
    expect_refusal("bad.gguf", {"expected"},
                   [&] { engine::model::load(folder.path() / "bad.gguf"); });
  }
  const auto whole = engine::read_file(paths::gguf());
  folder.write("bad.gguf", whole.substr(0, whole.size() / 2));
  expect_refusal("bad.gguf", {"got a file of"},
                 [&] { engine::model::load(folder.path() / "bad.gguf"); });
}

}  // namespace gguf_test
