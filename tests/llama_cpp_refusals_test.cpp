// What the adapter refuses, and what an error within the callback does.
#include <catch2/catch.hpp>

#include "support/llama_files.hpp"

namespace {

using namespace test;
using kvfold::budget;
using kvfold::llama::mode;
using kvfold::llama::model_facts;
using kvfold::llama::options;
using adapter = kvfold::llama::compressor<evaluate::any_policy>;

template <class Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const kvfold::invalid_argument& e) {
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

}  // namespace

TEST_CASE("llama.cpp: models that cannot be compressed are refused by the feature's name") {
  const auto said = [](auto change) {
    model_facts facts = plain();
    change(facts);
    return refusal([&] { kvfold::llama::shape_of(facts); });
  };
  using Catch::Contains;
  CHECK(said([](auto&) {}) == "not refused");
  CHECK_THAT(said([](auto& m) { m.recurrent = true; }), Contains("recurrent memory"));
  CHECK_THAT(said([](auto& m) { m.hybrid = true; }), Contains("hybrid memory"));
  CHECK_THAT(said([](auto& m) { m.encoder = true; }), Contains("encoder"));
  CHECK_THAT(said([](auto& m) { m.diffusion = true; }), Contains("diffusion"));
  CHECK_THAT(said([](auto& m) { m.window = 512; }), Contains("sliding-window"));
  CHECK_THAT(said([](auto& m) { m.rotation = LLAMA_ROPE_TYPE_MROPE; }), Contains("M-RoPE"));
  CHECK_THAT(said([](auto& m) { m.rotation = LLAMA_ROPE_TYPE_IMROPE; }), Contains("M-RoPE"));
  CHECK_THAT(said([](auto& m) { m.alibi = true; }), Contains("ALiBi"));
  CHECK_THAT(said([](auto& m) { m.latent = true; }), Contains("MLA"));
  CHECK_THAT(said([](auto& m) { m.capped = true; }), Contains("capped"));
  CHECK_THAT(said([](auto& m) { m.value_dim = 8; }), Contains("different lengths"));
  CHECK_THAT(said([](auto& m) { m.kv_heads = 3; }), Contains("multiple of the KV heads"));
}

TEST_CASE("llama.cpp: the facts of real files, MLA and ALiBi among them") {
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
  CHECK((llama.rotation == LLAMA_ROPE_TYPE_NORM && !llama.alibi && !llama.latent));
  CHECK(llama.context == 4096);
  CHECK(facts([](gguf_context* g) { gguf_set_val_u32(g, "llama.attention.kv_lora_rank", 8); },
              "llama")
            .latent);
  CHECK(facts({}, "refact").alibi);
}

TEST_CASE("llama.cpp: contexts and budgets that cannot work are refused, and nothing is changed") {
  twin models;
  const auto said = [&](auto change, options o = {.limits = {{.target = 96}}},
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
  CHECK_THAT(said([](auto& p) { p.type_v = GGML_TYPE_F16; }), Contains("values in f32"));
  CHECK_THAT(said([](auto& p) { p.n_seq_max = 4; }), Contains("without unified KV"));
  CHECK(said([](auto& p) { p.n_seq_max = 4, p.kv_unified = true; }) == "not refused");
  CHECK_THAT(said([](auto& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; }),
             Contains("flash attention off expected"));
  const options own{.how = mode::own_attention, .limits = {{.target = 96}}};
  CHECK_THAT(said([](auto& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED; }, own),
             Contains("flash attention on expected"));
  CHECK_THAT(said([](auto& p) { p.cb_eval = [](ggml_tensor*, bool, void*) { return true; }; }),
             Contains("no cb_eval"));
  CHECK_THAT(said([](auto& p) { p.embeddings = true; }), Contains("embeddings"));
  const auto nothing = [](auto&) {};
  CHECK_THAT(said(nothing, {.limits = {{.target = 300}}}), Contains("n_ctx of at least 301"));
  CHECK_THAT(said(nothing, {.limits = {{.target = 3}}}), Contains("budget of at least"));
  CHECK_THAT(said(nothing, {.limits = {{96}, {96}, {96}}}), Contains("1 budget, 2 (layers) or 4"));
  CHECK_THAT(said(nothing, {.limits = {{96}}, .untouched = {2}}), Contains("layers 0 to 1"));
}

TEST_CASE("llama.cpp: an error within the callback stops llama_decode, and reset makes good") {
  for (const mode how : {mode::repack, mode::own_attention}) {
    twin models;
    const auto text = draw_tokens(128, models.shape.vocab);
    compressed_llama kv(models.theirs.get(), policy_named("h2o"),
                        {.how = how, .limits = {{.target = 96}}}, exact_parameters(256, 64));
    const auto first = kv.decode(std::span(text).first(64));
    int code = 0;
    // A gap: the engine allows one behind nothing.
    llama_memory_clear(llama_get_memory(kv.context.get()), true);
    const auto part = std::span(text).subspan(64, 32);
    decode(kv.context.get(), part, 5, &code);
    CHECK(code == 2);
    CHECK_THROWS_WITH(kv.kv.check(), Catch::Contains("consecutive positions"));
    decode(kv.context.get(), part, 6, &code);  // and goes on failing
    CHECK(code != 0);
    llama_memory_clear(llama_get_memory(kv.context.get()), true);
    kv.kv.reset();
    kv.position = 0;
    CHECK(difference(kv.decode(std::span(text).first(64)), first) == 0);
    // A text from position 0 needs no reset.
    llama_memory_clear(llama_get_memory(kv.context.get()), true);
    kv.position = 0;
    CHECK(difference(kv.decode(std::span(text).first(64)), first) == 0);
    kv.decode(std::span(text).subspan(64, 64));
    CHECK(kv.kv.report().slots == 96);
  }
}
