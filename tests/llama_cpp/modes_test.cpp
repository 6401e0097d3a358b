// SPDX-License-Identifier: MIT
// Budgets of layers and heads, layers left alone, micro-batches, threads, half rows.
#include <catch2/catch.hpp>

#include "llama_cpp/files.hpp"

namespace modes_test {

using namespace test;
using kvmeld::budget;
using kvmeld::llama::mode;
using kvmeld::llama::options;

constexpr index_t chunk = 64;

TEST_CASE("llama.cpp: layers have their own budgets, and a layer can be left alone") {
  twin models;
  const auto text = draw_tokens(448, models.shape.vocab);
  for (const std::string name :
       {"h2o", "fold", "ems:window=8", "streaming_llm", "expected_attention"}) {
    CAPTURE(name);
    const auto p = policy_named(name);
    for (const bool whole : {false, true}) {
      // The first prompt is one token over the first layer's budget.
      const std::vector<budget> limits = {{.slots = 63}, {.slots = 80, .trigger = 200}};
      chunked_engine ours(models.ours, p, limits, 512, {static_cast<char>(whole), 0});
      std::vector<engine::row_major_matrix> wanted;
      for (std::size_t at = 0; at < text.size(); at += chunk) {
        wanted.push_back(ours.decode(std::span(text).subspan(at, chunk)));
      }
      for (const mode how : {mode::repack, mode::own_attention}) {
        options o{.how = how, .limits = limits};
        if (whole) {
          o.untouched = {0};
        }
        compressed_llama kv(models.theirs.get(), p, o, exact_parameters(512, chunk));
        // fold's seeds may be others after a few chunks: see "every policy gives the logits".
        auto got = run(kv, text);
        const std::size_t alike = name == "fold" ? 3 : got.size();
        REQUIRE(got.size() == wanted.size());
        CHECK(apart({got.begin(), got.begin() + static_cast<std::ptrdiff_t>(alike)},
                    {wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(alike)}) < 1e-3F);
        const auto r = kv.kv.report();
        CHECK(r.slots == (whole ? 448 : 80));
        CHECK(r.cells == (how == mode::own_attention ? 1 : r.slots));
        for (index_t h = 0; h < 2; ++h) {
          auto& all = kv.kv.held();
          CHECK((all.state(0, h) == nullptr) == whole);
          CHECK((whole ||
                 (all.state(0, h)->observed() == 0) == !kvmeld::declared(p).uses_attention()));
          CHECK((all.state(1, h)->observed() == 0) == !kvmeld::declared(p).uses_attention());
        }
      }
    }
  }
}

TEST_CASE(
    "llama.cpp: heads have their own budgets, and own attention holds no more than they say") {
  twin models;
  const auto text = draw_tokens(448, models.shape.vocab);
  // One of them has a slot less than the longest.
  const std::vector<budget> limits = {{.slots = 24}, {.slots = 96}, {.slots = 95}, {.slots = 32}};
  std::vector<std::vector<engine::row_major_matrix>> logits;
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(models.theirs.get(), policy_named("fold"), {.how = how, .limits = limits},
                        exact_parameters(256, chunk));
    logits.push_back(run(kv, text));
    index_t slots = 0;
    for (index_t l = 0; l < 2; ++l) {
      for (index_t h = 0; h < 2; ++h) {
        const auto head = kv.kv.held().head(l, h);
        CHECK(head.length() == limits[static_cast<std::size_t>(2 * l + h)].slots);
        CHECK(head.next_position() == 448);
        slots += head.length();
      }
    }
    CHECK(slots == 24 + 96 + 95 + 32);
  }
  CHECK(apart(logits[0], logits[1]) < 1e-3F);
}

TEST_CASE("llama.cpp: a policy that never compresses gives the engine's own logits") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab);
  const auto wanted = full_logits(models.ours, text);
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(models.theirs.get(), policy_named("full_cache"),
                        {.how = how, .limits = {{.slots = 16}}}, exact_parameters(256, chunk));
    const auto got = run(kv, text);
    for (std::size_t i = 0; i < got.size(); ++i) {
      CHECK(difference(got[i], wanted.middleRows(static_cast<Eigen::Index>(i) * chunk, chunk)) <
            1e-3F);
    }
    CHECK(kv.kv.report().slots == 192);
  }
}

TEST_CASE("llama.cpp: single tokens pile up under a policy that compresses prompts only") {
  twin models;
  const auto text = draw_tokens(165, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(models.theirs.get(), policy_named("attention_matching:recent=4"),
                        {.how = how, .limits = {{.slots = 96}}}, exact_parameters(256, chunk));
    const auto part = [&](std::size_t at, std::size_t n) {
      for (std::size_t i = at; i < at + n; i += std::min<std::size_t>(n, chunk)) {
        kv.decode(std::span(text).subspan(i, std::min<std::size_t>(n, chunk)));
      }
      return kv.kv.report().slots;
    };
    CHECK(part(0, 128) == 96);
    for (index_t i = 0; i < 5; ++i) {
      CHECK(part(128 + static_cast<std::size_t>(i), 1) == 97 + i);
    }
    CHECK(part(133, 32) == 96);
  }
}

TEST_CASE("llama.cpp: cells that the engine adds to n_ctx can be used") {
  twin models;
  const auto text = draw_tokens(384, models.shape.vocab);
  const options o{.limits = {{.slots = 80}}};
  compressed_llama few(models.theirs.get(), policy_named("h2o"), o, exact_parameters(100, chunk)),
      more(models.theirs.get(), policy_named("h2o"), o, exact_parameters(256, chunk));
  CHECK(llama_n_ctx(few.context.get()) == 256);  // a multiple of it
  CHECK(apart(run(few, text), run(more, text)) == 0);
}

TEST_CASE("llama.cpp: micro-batches, threads and sequences' flags do not change the logits") {
  twin models;
  const auto text = draw_tokens(448, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    for (const std::string name : {"h2o", "keepkv", "fold"}) {
      CAPTURE(name);
      const options o{.how = how, .limits = {{.slots = 96}}};
      compressed_llama one(models.theirs.get(), policy_named(name), o, exact_parameters(256, 32));
      const auto wanted = run(one, text, 32);
      auto parameters = exact_parameters(256, 32);
      parameters.n_batch = 128;  // four micro-batches a batch
      compressed_llama several(models.theirs.get(), policy_named(name), o, parameters);
      const auto got = run(several, text, 128);
      float most = 0;
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto rows = got[i / 4].middleRows(static_cast<Eigen::Index>(i % 4) * 32, 32);
        most = std::max(most, difference(wanted[i], rows));
      }
      // The engine chose the cells of all four before the first was compressed: other cells, other
      // sums.
      CHECK(most < 1e-4F);
      if (name != "h2o") {
        continue;
      }
      // Few: on a busy machine llama.cpp's threads wait for each other at every node, spinning.
      parameters = exact_parameters(256, 32);
      parameters.n_threads = parameters.n_threads_batch = 2;
      parameters.n_seq_max = 2;
      parameters.kv_unified = true;
      compressed_llama threads(models.theirs.get(), policy_named(name), o, parameters);
      CHECK(apart(run(threads, std::vector(text.begin(), text.begin() + 128), 32),
                  {wanted.begin(), wanted.begin() + 4}) == 0);
    }
  }
}

TEST_CASE("llama.cpp: half rows in both modes") {
  twin models;
  const auto text = draw_tokens(448, models.shape.vocab);
  for (const std::string name : {"streaming_llm", "random:window=8"}) {  // rounding decides nothing
    CAPTURE(name);
    const options exact{.limits = {{.slots = 96}}};
    compressed_llama wanted(models.theirs.get(), policy_named(name), exact,
                            exact_parameters(256, chunk));
    const auto logits = run(wanted, text);
    for (const mode how : {mode::repack, mode::own_attention}) {
      auto parameters = exact_parameters(256, chunk);
      parameters.type_k = parameters.type_v = GGML_TYPE_F16;
      const options o{.how = how, .limits = {{.slots = 96}}};
      compressed_llama kv(models.theirs.get(), policy_named(name), o, parameters);
      const float d = apart(run(kv, text), logits);
      CHECK(d < 0.1F);
      CHECK(d > 0);
      CHECK(kv.kv.report().full_bytes == wanted.kv.report().full_bytes / 2);
    }
  }
}

TEST_CASE("llama.cpp: half rows under policies that measure and merge") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab, 4);  // rounding decides nothing in it
  for (const std::string name : {"h2o", "keepkv", "fold", "ems:window=8", "snapkv:window=8"}) {
    CAPTURE(name);
    compressed_llama exact(models.theirs.get(), policy_named(name), {.limits = {{.slots = 96}}},
                           exact_parameters(256, chunk));
    const auto wanted = run(exact, text);
    for (const mode how : {mode::repack, mode::own_attention}) {
      auto parameters = exact_parameters(256, chunk);
      parameters.type_k = parameters.type_v = GGML_TYPE_F16;
      compressed_llama kv(models.theirs.get(), policy_named(name),
                          {.how = how, .limits = {{.slots = 96}}}, parameters);
      const float d = apart(run(kv, text), wanted);
      CHECK(d < 0.05F);
      CHECK(d > 0);
    }
  }
}

TEST_CASE("llama.cpp: a batch that asks for no logits is compressed all the same") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab);
  const options o{.limits = {{.slots = 96}}};
  compressed_llama quiet(models.theirs.get(), policy_named("h2o"), o, exact_parameters(256, chunk)),
      asked(models.theirs.get(), policy_named("h2o"), o, exact_parameters(256, chunk));
  for (index_t at = 0; at < 128; at += chunk) {
    const auto part = std::span(text).subspan(static_cast<std::size_t>(at), chunk);
    asked.decode(part);
    llama_batch batch = llama_batch_init(chunk, 0, 1);
    batch.n_tokens = chunk;
    for (int i = 0; i < chunk; ++i) {
      batch.token[i] = part[static_cast<std::size_t>(i)];
      batch.pos[i] = at + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 0;
    }
    CHECK(llama_decode(quiet.context.get(), batch) == 0);
    llama_batch_free(batch);
  }
  quiet.position = 128;
  CHECK(quiet.kv.report().slots == 96);
  const auto rest = std::span(text).subspan(128);
  CHECK(difference(quiet.decode(rest), asked.decode(rest)) == 0);
}

}  // namespace modes_test
