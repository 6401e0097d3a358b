// SPDX-License-Identifier: MIT
// Models of other families than llama: their full layers are compressed, as llama.cpp's own
// attention without the evicted slots says; windowed layers stay the engine's.
#include "llama_cpp/families.hpp"

#include <catch2/catch.hpp>

namespace families_test {

using namespace test;
using kvmeld::llama::mode;

constexpr index_t chunk = 64, slots = 48, cells = 256;

/// Chunks of a text, and single tokens after every fourth of them.
std::vector<std::span<const int>> parts_of(std::span<const int> text) {
  std::vector<std::span<const int>> parts;
  for (std::size_t at = 0; at < text.size(); at += parts.back().size()) {
    const std::size_t n = parts.size() % 12 < 4 ? chunk : 1;
    parts.push_back(text.subspan(at, std::min(n, text.size() - at)));
  }
  return parts;
}

/// The largest difference of logits to llama.cpp's own attention over the slots that the adapter
/// keeps, and of that to the full cache.
struct distances {
  float own = 0, effect = 0, size = 0;  ///< size: the largest logit
};

/// Of a logit of 1. Flash attention casts the rows of windowed layers to halves.
float tolerance(const family& f, mode how) {
  return how == mode::own_attention && f.window > 0 ? 1e-2F : 1e-4F;
}

distances compare(const family& f, llama_model* model, mode how, const std::string& policy) {
  const auto text = draw_tokens(600, family::vocab);
  compressed_llama kv(model, policy_named(policy), {.how = how, .limits = {{.slots = slots}}},
                      exact_parameters(cells, chunk));
  masked_llama masked(model, 640, chunk), full(model, 640, chunk);
  distances d;
  for (const auto part : parts_of(text)) {
    const auto wanted = masked.decode(part), whole = full.decode(part);
    d.own = std::max(d.own, difference(kv.decode(part), wanted));
    d.effect = std::max(d.effect, difference(whole, wanted));
    d.size = std::max(d.size, wanted.cwiseAbs().maxCoeff());
    for (index_t l = 0; l < family::layers; ++l) {
      REQUIRE(kv.kv.held().holds(l) == !f.windowed(l));
      for (index_t h = 0; h < family::kv_heads && !f.windowed(l); ++h) {
        const auto head = kv.kv.held().head(l, h);
        std::set<index_t> kept;
        for (index_t s = 0; s < head.length(); ++s) {
          kept.insert(head.position(s));
        }
        masked.keep(l, h, kept);
      }
    }
  }
  const auto r = kv.kv.report();
  CHECK(r.tokens == 600);
  if (f.window > 0) {  // the engine answers for its windowed layers: their window is there
    CHECK(llama_memory_seq_pos_min(llama_get_memory(kv.context.get()), 0) <= 600 - f.window);
  }
  CHECK(r.slots == slots);
  CHECK(r.cells == (how == mode::repack ? slots : std::max(f.window, 1)));
  return d;
}

TEST_CASE("llama.cpp: every family gives its own logits before anything is evicted") {
  for (const family& f : families()) {
    const auto model = random_model(f);
    const auto text = draw_tokens(200, family::vocab);
    for (const mode how : {mode::repack, mode::own_attention}) {
      CAPTURE(f.arch, f.scaling, how);
      compressed_llama kv(model.get(), policy_named("h2o"),
                          {.how = how, .limits = {{.slots = 250}}}, exact_parameters(512, chunk));
      masked_llama full(model.get(), 512, chunk);
      float most = 0, size = 0;
      for (const auto part : parts_of(text)) {
        const auto wanted = full.decode(part);
        most = std::max(most, difference(kv.decode(part), wanted));
        size = std::max(size, wanted.cwiseAbs().maxCoeff());
      }
      CHECK(kv.kv.report().slots == 200);
      CHECK(size > 1);
      CHECK(most < tolerance(f, how) * size);
    }
  }
}

TEST_CASE("llama.cpp: every family loses no more than the slots that are evicted") {
  for (const family& f : families()) {
    const auto model = random_model(f);
    for (const mode how : {mode::repack, mode::own_attention}) {
      for (const std::string policy : {"h2o", "streaming_llm", "snapkv:window=8"}) {
        CAPTURE(f.arch, f.scaling, how, policy);
        const auto d = compare(f, model.get(), how, policy);
        CAPTURE(d.own, d.effect, d.size);
        CHECK(d.own < tolerance(f, how) * d.size);
        CHECK(d.effect > 0.05F * d.size);
      }
    }
  }
}

TEST_CASE("llama.cpp: scale, cap and sinks are read off the nodes of a layer's attention") {
  ggml_context* const memory = ggml_init({std::size_t{1} << 20, nullptr, false});
  const auto tensor = [&](std::int64_t a, std::int64_t b, std::int64_t c) {
    return ggml_new_tensor_3d(memory, GGML_TYPE_F32, a, b, c);
  };
  ggml_tensor* const dots = ggml_mul_mat(memory, tensor(16, 8, 4), tensor(16, 3, 4));
  ggml_tensor* const capped =
      ggml_scale(memory, ggml_tanh(memory, ggml_scale(memory, dots, 0.5F)), 6);
  using kvmeld::llama::logits_of;
  CHECK(logits_of::read(dots)->products == dots);
  CHECK(logits_of::read(capped)->products == dots);
  for (ggml_tensor* const other :
       {ggml_scale(memory, dots, 2), ggml_add(memory, dots, dots), ggml_tanh(memory, dots),
        ggml_scale(memory, ggml_relu(memory, ggml_scale(memory, dots, 0.5F)), 6),
        ggml_scale_bias(memory, ggml_tanh(memory, ggml_scale(memory, dots, 0.5F)), 6, 1)}) {
    CHECK_FALSE(logits_of::read(other).has_value());
  }
  CHECK(logits_of::capped_layer(capped) == -1);
  ggml_set_name(dots, "kq-3");
  CHECK(logits_of::capped_layer(capped) == 3);
  CHECK(logits_of::capped_layer(dots) == -1);

  kvmeld::attention_spec spec{.kv_heads = 2, .group = 2, .key_dim = 16};
  const auto soft_max = [&](ggml_tensor* x, float bias = 0) {
    ggml_tensor* const mask = ggml_new_tensor_2d(memory, GGML_TYPE_F32, 8, 3);
    return kvmeld::llama::read_attention(ggml_soft_max_ext(memory, x, mask, 0.25F, bias), 3, spec);
  };
  CHECK((soft_max(dots) == 0.25F && spec.scale == 0.25F && spec.soft_cap == 0));
  // 0.25 · 6 · tanh(0.5 x) is 1.5 · tanh(0.75 x / 1.5).
  CHECK((soft_max(capped) == 0.25F && spec.scale == 0.75F && spec.soft_cap == 1.5F));
  CHECK(spec.sink_logits.empty());
  CHECK_THROWS_WITH(soft_max(dots, 8),
                    Catch::Contains("without ALiBi (a bias of 0), got one of 8"));
  CHECK_THROWS_WITH(
      soft_max(ggml_add(memory, dots, dots)),
      Catch::Contains(
          "expected logits of layer 3 that are products, or these with a cap, got ADD"));
  ggml_free(memory);
}

}  // namespace families_test
