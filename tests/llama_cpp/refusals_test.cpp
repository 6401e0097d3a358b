// SPDX-License-Identifier: MIT
// What the adapter refuses, and what an error within the callback does.
#include <catch2/catch.hpp>
#include <memory>

#include "llama_cpp/files.hpp"

namespace refusals_test {

using namespace test;
using kvmeld::budget;
using kvmeld::llama::mode;
using kvmeld::llama::model_facts;
using kvmeld::llama::options;
using adapter = kvmeld::llama::compressor<evaluate::any_policy>;

template <class Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const kvmeld::error& e) {
    return e.what();
  }
  return "not refused";
}

model_facts plain() {
  return {.architecture = "llama",
          .heads = 4,
          .kv_heads = 2,
          .dim = 16,
          .value_dim = 16,
          .context = 4096};
}

TEST_CASE("llama.cpp: models that cannot be compressed are refused by the feature's name") {
  const auto said = [](auto change) {
    model_facts facts = plain();
    change(facts);
    return refusal([&] { kvmeld::llama::spec_of(facts); });
  };
  using Catch::Contains;
  CHECK(said([](auto&) {}) == "not refused");
  CHECK_THAT(said([](auto& m) { m.recurrent = true; }), Contains("recurrent memory"));
  CHECK_THAT(said([](auto& m) { m.hybrid = true; }), Contains("hybrid memory"));
  CHECK_THAT(said([](auto& m) { m.encoder = true; }), Contains("encoder"));
  CHECK_THAT(said([](auto& m) { m.diffusion = true; }), Contains("diffusion"));
  CHECK_THAT(said([](auto& m) { m.rotation = LLAMA_ROPE_TYPE_MROPE; }), Contains("M-RoPE"));
  CHECK_THAT(said([](auto& m) { m.rotation = LLAMA_ROPE_TYPE_IMROPE; }), Contains("M-RoPE"));
  CHECK_THAT(said([](auto& m) { m.rotation = LLAMA_ROPE_TYPE_VISION; }), Contains("M-RoPE"));
  CHECK_THAT(said([](auto& m) { m.rotation = LLAMA_ROPE_TYPE_NONE; }), Contains("no RoPE"));
  CHECK_THAT(said([](auto& m) { m.latent = true; }), Contains("MLA"));
  CHECK_THAT(said([](auto& m) { m.value_dim = 8; }), Contains("different lengths"));
  CHECK_THAT(said([](auto& m) { m.kv_heads = 0; }), Contains("no KV heads"));
  CHECK_THAT(said([](auto& m) { m.kv_heads = 3; }), Contains("multiple of the KV heads"));
}

TEST_CASE("llama.cpp: the facts of real files, MLA among them") {
  temporary_folder folder;
  const auto shape = small_shape();
  const auto weights = draw_weights(shape, 7);
  const auto facts = [&](const gguf_edit& edit, const std::string& arch) {
    write_gguf(folder.path() / "m.gguf", shape, weights, edit, arch);
    const auto model = load_gguf(folder.path() / "m.gguf");
    REQUIRE(model != nullptr);
    return model_facts::of(model.get());
  };
  const auto llama = facts({}, "llama");
  CHECK((llama.heads == 4 && llama.kv_heads == 2 && llama.dim == 16 && llama.value_dim == 16));
  CHECK((llama.rotation == LLAMA_ROPE_TYPE_NORM && !llama.latent));
  CHECK(llama.context == 4096);
  CHECK(facts([](gguf_context* g) { gguf_set_val_u32(g, "llama.attention.kv_lora_rank", 8); },
              "llama")
            .latent);
  const auto refact = facts({}, "refact");
  CHECK(refact.rotation == LLAMA_ROPE_TYPE_NONE);
  CHECK_THAT(refusal([&] { kvmeld::llama::spec_of(refact); }),
             Catch::Contains("expected a model that can be compressed, got refact with no RoPE"));
  // Lengths that the file leaves out are those of the embedding's heads.
  const auto without = facts(
      [](gguf_context* g) {
        gguf_remove_key(g, "llama.attention.key_length");
        gguf_remove_key(g, "llama.attention.value_length");
      },
      "llama");
  CHECK((without.dim == 16 && without.value_dim == 16));
}

TEST_CASE("llama.cpp: who is refused a context is as before, and may ask for another") {
  twin models;
  std::int64_t bytes = 0;  // the fewest in rows in half, as they are until a context says theirs
  const auto made = [&] {
    return std::make_unique<adapter>(
        models.theirs.get(), policy_named("h2o"),
        options{.how = mode::own_attention, .limits = {budget::bytes(bytes)}});
  };
  do {
    bytes += 64;
  } while (refusal(made) != "not refused");
  const auto kv = made();
  const index_t slots = kv->slots();
  auto p = exact_parameters(256, 64);
  CHECK_THAT(refusal([&] { kv->attach(p); }), Catch::Contains("of at least"));
  CHECK(kv->slots() == slots);
  CHECK(kv->report().slots == 0);
  p.type_k = p.type_v = GGML_TYPE_F16;
  kv->attach(p);
  CHECK(kv->slots() == slots);
}

TEST_CASE("llama.cpp: contexts and budgets that cannot work are refused, and nothing is changed") {
  twin models;
  const auto said = [&](auto change, options o = {.limits = {{.slots = 96}}},
                        const std::string& name = "h2o") {
    return refusal([&] {
      adapter kv(models.theirs.get(), policy_named(name), o);
      auto p = exact_parameters(256, 64);
      change(p);
      const auto before = p;
      try {
        kv.attach(p);
      } catch (...) {
        CHECK((p.cb_eval == before.cb_eval && p.flash_attn_type == before.flash_attn_type));
        throw;
      }
    });
  };
  using Catch::Contains;
  CHECK(said([](auto&) {}) == "not refused");
  CHECK_THAT(said([](auto& p) { p.type_k = GGML_TYPE_Q8_0; }), Contains("quantised K (q8_0)"));
  CHECK_THAT(said([](auto& p) { p.type_v = GGML_TYPE_F16; }), Contains("expected values in f32"));
  CHECK_THAT(said([](auto& p) { p.n_seq_max = 4; }), Contains("without unified KV"));
  CHECK(said([](auto& p) { p.n_seq_max = 4, p.kv_unified = true; }) == "not refused");
  CHECK_THAT(said([](auto& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; }),
             Contains("expected flash attention off"));
  const options own{.how = mode::own_attention, .limits = {{.slots = 96}}};
  const auto in_q8_0 = [](auto& p) { p.type_k = p.type_v = GGML_TYPE_Q8_0; };
  CHECK_THAT(said(in_q8_0, own),
             Contains("expected a dim that is a multiple of 32 for q8_0, got 16"));
  CHECK_THAT(said([](auto& p) { p.type_k = p.type_v = GGML_TYPE_Q4_0; }, own),
             Contains("quantised K (q4_0)"));
  CHECK_THAT(said([](auto& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED; }, own),
             Contains("expected flash attention on"));
  CHECK_THAT(said([](auto& p) { p.cb_eval = [](ggml_tensor*, bool, void*) { return true; }; }),
             Contains("expected no cb_eval"));
  CHECK_THAT(said([](auto& p) { p.embeddings = true; }), Contains("embeddings"));
  CHECK_THAT(said([](auto& p) { p.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL; }),
             Contains("expected causal attention"));
  const auto nothing = [](auto&) {};
  CHECK_THAT(said(nothing, {.limits = {{.slots = 300}}}),
             Contains("expected an n_ctx of at least 301"));
  CHECK_THAT(said(nothing, {.limits = {{.slots = 3}}}), Contains("budget of at least"));
  CHECK_THAT(said(nothing, {.limits = {{96}, {96}, {96}}}),
             Contains("expected 1 budget, 2 (one per layer) or 4 (one per KV head), got 3"));
  CHECK_THAT(said(nothing, {.limits = {{96}}, .untouched = {2}}),
             Contains("expected untouched layers 0 to 1"));
  CHECK_THAT(said(nothing, {.limits = {{96}}, .untouched = {-1}}),
             Contains("expected untouched layers 0 to 1"));
  const auto in_rows = [&](const kvmeld::storage_pair& rows) {
    return said(nothing, {.how = mode::own_attention, .limits = {{96}}, .rows = rows});
  };
  using kvmeld::storage;
  CHECK(in_rows({storage::k6, storage::q8_0, 64}) == "not refused");
  CHECK_THAT(in_rows({storage::f16, storage::k6}), Contains("expected values in a storage of"));
  CHECK_THAT(in_rows({storage::k6, storage::q8_0, 65}), Contains("0 to 64 newest rows in half"));
  // No n_ctx: the trained context's cells.
  CHECK(said([](auto& p) { p.n_ctx = 0; }, {.limits = {{4095}}}) == "not refused");
  CHECK_THAT(said([](auto& p) { p.n_ctx = 0; }, {.limits = {{4096}}}), Contains("at least 4097"));
  CHECK(said(nothing, {.limits = {{255}}}) == "not refused");
  CHECK_THAT(said(nothing, {.limits = {{256}}}), Contains("expected an n_ctx of at least 257"));
  CHECK(said(nothing, {.limits = {{300}}}, "full_cache") == "not refused");
  CHECK_THAT(said(nothing, {.limits = {{96}}}, "kvzip"), Contains("a second pass over the prompt"));
  CHECK_THAT(said(nothing, {.how = mode::repack, .limits = {{96}}},
                  "ems:with_position=0,merge_unrotated=1"),
             Contains("expected mode::own_attention with ems and merge_unrotated=1"));
}

TEST_CASE(
    "llama.cpp: a context that is not the one that was prepared is refused in its first graph") {
  twin models;
  const auto text = draw_tokens(64, models.shape.vocab);
  const auto said = [&](mode how, auto change, bool bound = true) {
    adapter kv(models.theirs.get(), policy_named("h2o"), {.how = how, .limits = {{.slots = 96}}});
    auto p = exact_parameters(256, 64);
    kv.attach(p);
    change(p);
    const llama_context_ptr context(llama_init_from_model(models.theirs.get(), p));
    REQUIRE(context != nullptr);
    if (bound) {
      kv.bind(context.get());
    }
    int code = 0;
    decode(context.get(), text, 0, &code);
    return refusal([&] {
      kv.check();
      CHECK(code == 0);
    });
  };
  using Catch::Contains;
  const auto nothing = [](auto&) {};
  CHECK(said(mode::repack, nothing) == "not refused");
  CHECK_THAT(said(mode::repack, nothing, false), Contains("expected bind(context)"));
  CHECK_THAT(said(mode::repack, [](auto& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; }),
             Contains("expected the flash attention that was prepared"));
  CHECK_THAT(said(mode::own_attention,
                  [](auto& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED; }),
             Contains("expected the flash attention that was prepared"));
  for (const mode how : {mode::repack, mode::own_attention}) {
    CHECK_THAT(said(how, [](auto& p) { p.type_k = p.type_v = GGML_TYPE_F16; }), Contains("in f32"));
    CHECK_THAT(said(how, [](auto& p) { p.n_seq_max = 2; }), Contains("cells]"));
  }
  adapter kv(models.theirs.get(), policy_named("h2o"), {.limits = {{.slots = 96}}});
  CHECK_THAT(refusal([&] { kv.bind(nullptr); }), Contains("expected a context"));
  // Wrong at the end of a graph, whose tokens are forgotten: only the next one can be stopped.
  auto p = exact_parameters(256, 64);
  kv.attach(p);
  const llama_context_ptr context(llama_init_from_model(models.theirs.get(), p));
  int code = 0;
  decode(context.get(), std::span(text).first(32), 0, &code);
  CHECK(code == 0);
  CHECK_THROWS_WITH(kv.check(), Contains("expected bind(context)"));
  decode(context.get(), std::span(text).first(32), 32, &code);
  CHECK(code == 2);
  llama_memory_clear(llama_get_memory(context.get()), true);
  kv.reset();
  kv.bind(context.get());
  decode(context.get(), text, 0, &code);
  CHECK(code == 0);
  CHECK(kv.report().tokens == 64);
}

TEST_CASE("llama.cpp: an error within the callback stops llama_decode, and reset makes good") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    for (const auto& p : {policy_named("h2o"), policy_named("fold"), by_slots()}) {
      CAPTURE(p.name());
      compressed_llama kv(models.theirs.get(), p, {.how = how, .limits = {{.slots = 96}}},
                          exact_parameters(256, 64));
      const auto chunks = [&] {
        kv.position = 0;
        std::vector<engine::row_major_matrix> logits;
        for (std::size_t at = 0; at < text.size(); at += 64) {
          logits.push_back(kv.decode(std::span(text).subspan(at, 64)));
        }
        return logits;
      };
      const auto clear = [&] { llama_memory_clear(llama_get_memory(kv.context.get()), true); };
      const auto first = chunks();
      const auto r = kv.kv.report();
      const auto oldest = [&] {
        return llama_memory_seq_pos_min(llama_get_memory(kv.context.get()), 0);
      };
      CHECK(oldest() == (how == mode::repack ? 0 : 191));
      int code = 0;
      // A gap: the engine allows one behind nothing.
      clear();
      const auto part = std::span(text).subspan(64, 32);
      decode(kv.context.get(), part, 5, &code);
      CHECK(code == 2);
      CHECK_THROWS_WITH(kv.kv.check(), Catch::Contains("consecutive positions"));
      decode(kv.context.get(), part, 6, &code);  // and goes on failing
      CHECK(code != 0);
      CHECK_THROWS_WITH(kv.kv.check(), Catch::Contains("consecutive positions"));
      clear();
      kv.kv.reset();
      CHECK(chunks() == first);
      // A text from position 0 needs no reset.
      clear();
      CHECK(chunks() == first);
      CHECK(oldest() == (how == mode::repack ? 0 : 191));
      CHECK(kv.kv.report().tokens == 192);
      CHECK(kv.kv.report().cells == r.cells);
      CHECK(kv.kv.report().slots == 96);
      CHECK(kv.kv.report().bytes == r.bytes);
    }
  }
}

TEST_CASE("llama.cpp: a report before the first graph says that nothing is held") {
  twin models;
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(models.theirs.get(), policy_named("h2o"),
                        {.how = how, .limits = {{.slots = 96}}}, exact_parameters(256, 64));
    const auto r = kv.kv.report();
    CHECK((r.tokens == 0 && r.cells == 0 && r.slots == 0 && r.bytes == 0 && r.full_bytes == 0));
    CHECK(r.reserved_bytes <= 2 * 4096);  // of h2o's columns; rows and records come with the tokens
  }
}

}  // namespace refusals_test
