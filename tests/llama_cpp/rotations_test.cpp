// SPDX-License-Identifier: MIT
// Rotations, as the adapter reads them off llama.cpp's graph, for policies that turn keys or
// queries.
#include <catch2/catch.hpp>
#include <memory>

#include "llama_cpp/files.hpp"

namespace {

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

}  // namespace

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
                                   {"llama", plain.llama3({.factor = 32})}}) {
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

TEST_CASE(
    "llama.cpp: a rotation that cannot be said stops the policies that turn, and them alone") {
  const auto scaling = [](const char* kind) {
    return [kind](gguf_context* g) {
      gguf_set_val_str(g, "llama.rope.scaling.type", kind);
      gguf_set_val_f32(g, "llama.rope.scaling.factor", 2);
      gguf_set_val_u32(g, "llama.rope.scaling.original_context_length", 2048);
    };
  };
  auto unknown = small_shape();
  unknown.rope = unknown.rope.llama3({.factor = 5});
  for (const gguf_edit& edit : {gguf_edit(scaling("linear")), gguf_edit(scaling("yarn")), {}}) {
    twin models(7, edit ? small_shape() : unknown, edit);
    for (const auto& p : {by_slots(), policy_named("fold"), policy_named("expected_attention"),
                          policy_named("ems:window=8,with_position=0")}) {
      CAPTURE(p.name());
      CHECK_THAT(said(models, p), Catch::Contains("got a RoPE that is scaled or partial"));
    }
    for (const std::string name : {"streaming_llm", "h2o", "ems:window=8", "keepkv"}) {
      CAPTURE(name);
      CHECK(said(models, policy_named(name)).empty());
    }
  }
}

TEST_CASE("llama.cpp: layers that are not turned stop the policies that turn, and them alone") {
  auto shape = small_shape();
  shape.layers = 4;
  twin models(7, shape, {}, "smollm3");  // which turns three layers of four
  for (const auto& p : {by_slots(), policy_named("fold"), policy_named("expected_attention")}) {
    CAPTURE(p.name());
    CHECK_THAT(said(models, p), Catch::Contains("not there in some layers"));
    CHECK_THAT(said(models, p, {0, 2}), Catch::Contains("not there in some layers"));
    CHECK(said(models, p, {3}).empty());
  }
  const auto text = draw_tokens(320, models.shape.vocab);
  for (const std::string name : {"streaming_llm", "h2o"}) {
    CAPTURE(name);
    CHECK(said(models, policy_named(name)).empty());
    const options o{.limits = {{.slots = 96}}},
        mine{.how = mode::own_attention, .limits = {{.slots = 96}}};
    compressed_llama repack(models.theirs.get(), policy_named(name), o,
                            exact_parameters(256, chunk)),
        own(models.theirs.get(), policy_named(name), mine, exact_parameters(256, chunk));
    for (std::size_t at = 0; at < text.size(); at += chunk) {
      const auto part = std::span(text).subspan(at, chunk);
      CHECK(difference(repack.decode(part), own.decode(part)) < 1e-3F);
    }
  }
}

TEST_CASE("llama.cpp: rotations are alike by their figures and their factors") {
  ggml_context* const memory = ggml_init({std::size_t{1} << 20, nullptr, false});
  ggml_tensor* const x = ggml_new_tensor_3d(memory, GGML_TYPE_F32, 16, 4, 3);
  ggml_tensor* const positions = ggml_new_tensor_1d(memory, GGML_TYPE_I32, 3);
  const auto turned = [&](float base, ggml_tensor* factors = nullptr) {
    return ggml_rope_ext(memory, x, positions, factors, 16, GGML_ROPE_TYPE_NORMAL, 4096, base, 1, 0,
                         1, 32, 1);
  };
  using kvmeld::llama::same_rotation;
  CHECK(same_rotation(turned(100), turned(100)));
  CHECK_FALSE(same_rotation(turned(100), turned(101)));
  CHECK_FALSE(same_rotation(turned(100), nullptr));
  CHECK_FALSE(same_rotation(nullptr, turned(100)));
  CHECK(same_rotation(nullptr, nullptr));
  // Factors stand in a buffer, as a model's do.
  const std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> host(ggml_backend_cpu_init(),
                                                                         &ggml_backend_free);
  ggml_context* const names = ggml_init({std::size_t{1} << 16, nullptr, true});
  ggml_tensor* const one = ggml_new_tensor_1d(names, GGML_TYPE_F32, 8);
  ggml_tensor* const other = ggml_new_tensor_1d(names, GGML_TYPE_F32, 8);
  ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(names, host.get());
  for (ggml_tensor* const t : {one, other}) {
    std::fill_n(static_cast<float*>(t->data), 8, 1.0F);
  }
  CHECK_FALSE(same_rotation(turned(100, one), turned(100)));
  CHECK_FALSE(same_rotation(turned(100), turned(100, one)));
  CHECK(same_rotation(turned(100, one), turned(100, one)));
  CHECK(same_rotation(turned(100, one), turned(100, other)));
  static_cast<float*>(other->data)[7] = 2;
  CHECK_FALSE(same_rotation(turned(100, one), turned(100, other)));
  // What a layer stores, behind views; and rows that were changed once more.
  ggml_tensor* const cache = ggml_new_tensor_2d(memory, GGML_TYPE_F32, 64, 8);
  ggml_tensor* const cells = ggml_new_tensor_1d(memory, GGML_TYPE_I64, 3);
  const auto stored = [&](ggml_tensor* rows) {
    return kvmeld::llama::rotation_behind(
        ggml_set_rows(memory, cache, ggml_reshape_2d(memory, rows, 64, 3), cells));
  };
  ggml_tensor* const keys = turned(100);
  CHECK(stored(keys) == keys);
  CHECK(stored(x) == nullptr);
  CHECK(stored(ggml_rms_norm(memory, keys, 1e-5F)) == nullptr);
  ggml_backend_buffer_free(buffer);
  ggml_free(names);
  ggml_free(memory);
}

TEST_CASE("llama.cpp: a rotation of part of a head, or by YaRN alone, is none") {
  ggml_context* const memory = ggml_init({std::size_t{1} << 20, nullptr, false});
  ggml_tensor* const x = ggml_new_tensor_3d(memory, GGML_TYPE_F32, 16, 4, 3);
  ggml_tensor* const positions = ggml_new_tensor_1d(memory, GGML_TYPE_I32, 3);
  const auto read = [&](int turned, int mode, float yarn = 0) {
    return kvmeld::llama::rope_of(
        ggml_rope_ext(memory, x, positions, nullptr, turned, mode, 4096, 100, 1, yarn, 1, 32, 1),
        16);
  };
  using kvmeld::rotary;
  REQUIRE(read(16, GGML_ROPE_TYPE_NORMAL).has_value());
  CHECK(read(16, GGML_ROPE_TYPE_NORMAL)->base() == 100);
  CHECK(read(16, GGML_ROPE_TYPE_NORMAL)->pairs_as() == rotary::pairing::interleaved);
  REQUIRE(read(16, GGML_ROPE_TYPE_NEOX).has_value());
  CHECK(read(16, GGML_ROPE_TYPE_NEOX)->pairs_as() == rotary::pairing::halves);
  CHECK_FALSE(read(8, GGML_ROPE_TYPE_NORMAL).has_value());
  CHECK_FALSE(read(16, GGML_ROPE_TYPE_NORMAL, 1).has_value());
  ggml_free(memory);
}
