// SPDX-License-Identifier: MIT
// Rotations, as the adapter reads them off llama.cpp's graph, for policies that turn keys or
// queries.
#include <catch2/catch.hpp>
#include <memory>

#include "llama_cpp/files.hpp"

namespace rotations_test {

using namespace test;
using kvmeld::llama::mode;
using kvmeld::llama::options;

constexpr index_t chunk = 64;

engine::config rotated(const kvmeld::rotary& r) {
  auto shape = small_shape();
  shape.rope = r;
  return shape;
}

/// What decoding says: nothing, or why it was stopped.
std::string said(twin& models, const evaluate::any_policy& p,
                 const std::vector<index_t>& untouched = {}) {
  compressed_llama kv(models.theirs.get(), p, {.limits = {{.slots = 96}}, .untouched = untouched},
                      exact_parameters(256, chunk));
  const auto text = draw_tokens(192, models.shape.vocab);
  for (index_t at = 0; at < 192; at += chunk) {
    int code = 0;
    decode(kv.context.get(), std::span(text).subspan(static_cast<std::size_t>(at), chunk), at,
           &code);
    try {
      kv.kv.check();
    } catch (const kvmeld::error& e) {
      CHECK(code == 2);
      return e.what();
    }
    CHECK(code == 0);
  }
  CHECK(kv.kv.report().slots == (untouched.empty() ? 96 : 192));
  return "";
}

TEST_CASE("llama.cpp: keys are turned by the model's own rotation") {
  using kvmeld::rotary;
  struct kind {
    const char* arch;
    rotary rope;
  };
  const auto plain = rotary::halves(10'000);
  for (const auto& [arch, rope] : {kind{"llama", rotary::halves(500'000)},
                                   {"exaone", plain},
                                   {"llama", plain.llama3({.factor = 8})},
                                   {"llama", plain.llama3({.factor = 32})},
                                   {"llama", plain.linear(3)}}) {
    CAPTURE(arch, rope.base(), rope.frequency(7, 16));
    twin models(7, rotated(rope), {}, arch);
    const auto text = draw_tokens(1024, models.shape.vocab);
    const auto p = by_slots();
    const kvmeld::budget limit{.slots = 96};
    chunked_engine ours(models.ours, p, {limit, limit}, 96 + chunk);
    compressed_llama repack(models.theirs.get(), p, {.limits = {limit}},
                            exact_parameters(256, chunk)),
        own(models.theirs.get(), p, {.how = mode::own_attention, .limits = {limit}},
            exact_parameters(256, chunk));
    float to_repack = 0, to_own = 0;
    for (std::size_t at = 0; at < text.size(); at += chunk) {
      const auto part = std::span(text).subspan(at, chunk);
      const auto wanted = ours.decode(part);
      to_repack = std::max(to_repack, difference(repack.decode(part), wanted));
      to_own = std::max(to_own, difference(own.decode(part), wanted));
    }
    CHECK(to_repack < 1e-3F);
    CHECK(to_own < 1e-3F);
  }
}

TEST_CASE("llama.cpp: a rotation that the context scales is read off the graph") {
  const auto scaling = [](const char* kind) {
    return [kind](gguf_context* g) {
      gguf_set_val_str(g, "llama.rope.scaling.type", kind);
      gguf_set_val_f32(g, "llama.rope.scaling.factor", 2);
      gguf_set_val_u32(g, "llama.rope.scaling.original_context_length", 2048);
    };
  };
  const auto plain = kvmeld::rotary::interleaved(small_shape().rope.base()).dims(16);
  for (const auto& [kind, rope] : {std::pair{"linear", plain.linear(2)},
                                   {"yarn", plain.yarn({.factor = 2, .original_context = 2048})}}) {
    CAPTURE(kind);
    twin models(7, small_shape(), scaling(kind));
    compressed_llama kv(models.theirs.get(), by_slots(), {.limits = {{.slots = 96}}},
                        exact_parameters(256, chunk));
    const auto text = draw_tokens(448, models.shape.vocab);
    const auto logits = run(kv, text);
    CHECK(kv.kv.held()[0].model.rope == rope);
    CHECK(kv.kv.held()[1].model.rope == rope);
    if (std::string(kind) == "linear") {  // YaRN's magnitude our engine does not know
      const engine::decoder ours(rotated(small_shape().rope.linear(2)),
                                 draw_weights(small_shape(), 7));
      chunked_engine loops(ours, by_slots(), {{.slots = 96}}, 96 + chunk);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        CHECK(difference(logits[i], loops.decode(std::span(text).subspan(i * chunk, chunk))) <
              1e-3F);
      }
    }
    for (const std::string name : {"fold", "expected_attention", "compactor",
                                   "ems:window=8,with_position=0", "streaming_llm", "h2o"}) {
      CAPTURE(name);
      CHECK(said(models, policy_named(name)).empty());
    }
  }
}

TEST_CASE("llama.cpp: every layer has its own rotation, or none") {
  auto shape = small_shape();
  shape.layers = 4;
  twin models(7, shape, {}, "smollm3");  // which turns three layers of four
  for (const auto& p : {by_slots(), policy_named("fold"), policy_named("expected_attention"),
                        policy_named("streaming_llm"), policy_named("h2o")}) {
    CAPTURE(p.name());
    CHECK(said(models, p).empty());
    CHECK(said(models, p, {3}).empty());
  }
  const auto text = draw_tokens(320, models.shape.vocab);
  for (const std::string name : {"streaming_llm", "h2o", "expected_attention"}) {
    CAPTURE(name);
    const options o{.limits = {{.slots = 96}}},
        mine{.how = mode::own_attention, .limits = {{.slots = 96}}};
    compressed_llama repack(models.theirs.get(), policy_named(name), o,
                            exact_parameters(256, chunk)),
        own(models.theirs.get(), policy_named(name), mine, exact_parameters(256, chunk));
    for (std::size_t at = 0; at < text.size(); at += chunk) {
      const auto part = std::span(text).subspan(at, chunk);
      CHECK(difference(repack.decode(part), own.decode(part)) < 1e-3F);
    }
    for (const index_t l : {0, 1, 2, 3}) {
      CHECK(own.kv.held()[l].model.rope.rotates() == (l < 3));
    }
  }
}

TEST_CASE("llama.cpp: what a layer stores is its keys as they were rotated") {
  ggml_context* const memory = ggml_init({std::size_t{1} << 20, nullptr, false});
  ggml_tensor* const x = ggml_new_tensor_3d(memory, GGML_TYPE_F32, 16, 4, 3);
  ggml_tensor* const positions = ggml_new_tensor_1d(memory, GGML_TYPE_I32, 3);
  ggml_tensor* const keys = ggml_rope_ext(memory, x, positions, nullptr, 16, GGML_ROPE_TYPE_NORMAL,
                                          4096, 100, 1, 0, 1, 32, 1);
  ggml_tensor* const cache = ggml_new_tensor_2d(memory, GGML_TYPE_F32, 64, 8);
  ggml_tensor* const cells = ggml_new_tensor_1d(memory, GGML_TYPE_I64, 3);
  const auto stored = [&](ggml_tensor* rows) {
    return kvmeld::llama::rotation_behind(
        ggml_set_rows(memory, cache, ggml_reshape_2d(memory, rows, 64, 3), cells));
  };
  CHECK(stored(keys) == keys);
  CHECK(stored(x) == nullptr);
  CHECK(stored(ggml_rms_norm(memory, x, 1e-5F)) == nullptr);
  CHECK_THROWS_WITH(stored(ggml_rms_norm(memory, keys, 1e-5F)),
                    Catch::Contains("expected keys that are stored as they were rotated"));
  ggml_free(memory);
}

TEST_CASE("llama.cpp: a rotation is read with its dimensions, scaling and factors") {
  ggml_context* const memory = ggml_init({std::size_t{1} << 20, nullptr, false});
  ggml_tensor* const x = ggml_new_tensor_3d(memory, GGML_TYPE_F32, 16, 4, 3);
  ggml_tensor* const positions = ggml_new_tensor_1d(memory, GGML_TYPE_I32, 3);
  const auto read = [&](int turned, int mode, float scale = 1, float yarn = 0,
                        ggml_tensor* factors = nullptr) {
    return kvmeld::llama::rope_of(ggml_rope_ext(memory, x, positions, factors, turned, mode, 4096,
                                                100, scale, yarn, 1, 32, 1));
  };
  using kvmeld::rotary;
  CHECK(read(16, GGML_ROPE_TYPE_NORMAL) == rotary::interleaved(100).dims(16));
  CHECK(read(8, GGML_ROPE_TYPE_NEOX) == rotary::halves(100).dims(8));
  CHECK(read(16, GGML_ROPE_TYPE_NEOX, 0.25F) == rotary::halves(100).dims(16).linear(4));
  CHECK(read(16, GGML_ROPE_TYPE_NEOX, 0.25F, 1) ==
        rotary::halves(100).dims(16).yarn({.factor = 4}));
  CHECK(kvmeld::llama::rope_of(nullptr) == rotary());
  CHECK_THROWS_WITH(read(16, GGML_ROPE_TYPE_NEOX, 1, 0.5F), Catch::Contains("YaRN in full"));
  // Factors stand in a buffer, as a model's do.
  const std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> host(ggml_backend_cpu_init(),
                                                                         &ggml_backend_free);
  ggml_context* const names = ggml_init({std::size_t{1} << 16, nullptr, true});
  ggml_tensor* const factors = ggml_new_tensor_1d(names, GGML_TYPE_F32, 4);
  ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(names, host.get());
  for (int p = 0; p < 4; ++p) {
    static_cast<float*>(factors->data)[p] = static_cast<float>(p + 1);
  }
  const auto by_factors = read(8, GGML_ROPE_TYPE_NORMAL, 0.5F, 0, factors),
             plain = rotary::interleaved(100).dims(8).linear(2);
  CHECK(by_factors.rotated(16) == 8);
  CHECK(by_factors.pairs_as() == rotary::pairing::interleaved);
  for (index_t p = 0; p < 4; ++p) {
    CHECK(by_factors.frequency(p, 16) == Approx(plain.frequency(p, 16) / (p + 1)));
  }
  ggml_backend_buffer_free(buffer);
  ggml_free(names);
  ggml_free(memory);
}

TEST_CASE("llama.cpp: keys are moved on by what was read as ggml itself turns them further") {
  ggml_context* const memory = ggml_init({std::size_t{1} << 22, nullptr, false});
  constexpr index_t dim = 16, from = 700, to = 2100;
  std::mt19937 bits(5);
  std::normal_distribution<float> normal;
  ggml_tensor* const x = ggml_new_tensor_3d(memory, GGML_TYPE_F32, dim, 1, 1);
  for (index_t i = 0; i < dim; ++i) {
    static_cast<float*>(x->data)[i] = normal(bits);
  }
  for (const int mode : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX}) {
    for (const int turned : {16, 8}) {
      for (const auto& [scale, yarn] : {std::pair{1.0F, 0.0F}, {0.25F, 0.0F}, {0.25F, 1.0F}}) {
        CAPTURE(mode, turned, scale, yarn);
        const auto at = [&](index_t position) {
          ggml_tensor* const positions = ggml_new_tensor_1d(memory, GGML_TYPE_I32, 1);
          *static_cast<std::int32_t*>(positions->data) = position;
          ggml_tensor* const y = ggml_rope_ext(memory, x, positions, nullptr, turned, mode, 1024,
                                               500, scale, yarn, 1, 32, 1);
          ggml_cgraph* const graph = ggml_new_graph(memory);
          ggml_build_forward_expand(graph, y);
          REQUIRE(ggml_graph_compute_with_ctx(memory, graph, 1) == GGML_STATUS_SUCCESS);
          return y;
        };
        ggml_tensor *const before = at(from), *const after = at(to);
        kvmeld::llama::rope_of(before).rotate(kvmeld::row<float>{kvmeld::llama::element(before, 0)},
                                              dim, to - from);
        for (index_t i = 0; i < dim; ++i) {
          CHECK(std::abs(*kvmeld::llama::element(before, i) - *kvmeld::llama::element(after, i)) <
                1e-3F);
        }
      }
    }
  }
  ggml_free(memory);
}

}  // namespace rotations_test
