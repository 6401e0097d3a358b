// SPDX-License-Identifier: MIT
// Own attention with rows in other formats than the engine's cells, and budgets in bytes.
#include <catch2/catch.hpp>

#include "llama_cpp/announced.hpp"

namespace rows_test {

using namespace test;
using kvmeld::budget;
using kvmeld::llama::mode;

constexpr index_t chunk = 64, prompt = 5 * chunk;

/// Bytes of the test's model for `tokens` tokens in 16 bits: 4 heads, a key and a value of 16 each.
constexpr std::int64_t half_bytes(index_t tokens) { return std::int64_t{4} * 2 * 16 * 2 * tokens; }

TEST_CASE("llama.cpp: rows in any format, and budgets in bytes, are those of the library") {
  const twin models;
  const auto text = draw_tokens(prompt + 24, models.shape.vocab);
  for (const std::string rows : {"half", "q8_0", "k8v4", "k6v4:newest=8", "k4v4:newest=0"}) {
    for (const bool shared : {true, false}) {
      CAPTURE(rows, shared);
      // One that evicts: clusters of rows that are rounded otherwise in a last bit are others.
      const auto p = policy_named("h2o");
      const budget limit{.is_shared = shared, .size = half_bytes(prompt) / 3};
      chunked_engine ours(models.ours, p, {limit}, 512, {}, angles::ours,
                          kvmeld::make_storage(rows));
      compressed_llama kv(models.theirs.get(), p,
                          {.how = mode::own_attention,
                           .limits = {limit},
                           .capacity = 512,
                           .rows = kvmeld::make_storage(rows)},
                          exact_parameters(512, chunk));
      double most = 0;
      const auto both = [&](std::span<const int> part) {
        const auto wanted = ours.decode(part);
        most = std::max(most, static_cast<double>(difference(kv.decode(part), wanted)));
      };
      for (index_t at = 0; at < prompt; at += chunk) {
        both(std::span(text).subspan(static_cast<std::size_t>(at), chunk));
      }
      if (shared) {
        ours.end_prompt();
        kv.kv.end_prompt();
      }
      for (std::size_t at = prompt; at < text.size(); ++at) {
        both(std::span(text).subspan(at, 1));
      }
      CHECK(most < 5e-2);  // a number between two codes may be rounded to the other
      std::size_t rounded = 0;
      for (index_t l = 0; l < 2; ++l) {
        for (index_t h = 0; h < 2; ++h) {
          const auto mine = kv.kv.held().head(l, h);
          CHECK(mine.type() == kvmeld::make_storage(rows));
          CHECK(mine.length() == ours.head(l, h).length());
          rounded += mine.type().newest > 0 && mine.rounded() > 0 ? 1 : 0;
        }
      }
      CHECK(rounded == (kvmeld::make_storage(rows).newest > 0 ? 4 : 0));
      const auto r = kv.kv.report();
      CHECK(static_cast<std::int64_t>(r.bytes) <= half_bytes(prompt) / 3);
      CHECK(static_cast<std::int64_t>(r.bytes) > half_bytes(prompt) / 4);
    }
  }
}

TEST_CASE("llama.cpp: keys are held less the mean of a whole chunk, whoever attends to it") {
  const twin models;
  const auto text = draw_tokens(chunk, models.shape.vocab);
  // The engine's own output stays where its cells are of 16 bits; layer 0 keeps all.
  for (const ggml_type cells : {GGML_TYPE_F16, GGML_TYPE_F32}) {
    for (const index_t newest : {0, 8}) {
      CAPTURE(ggml_type_name(cells), newest);
      const auto p = policy_named("h2o");
      const kvmeld::storage_pair rows{kvmeld::storage::k8, kvmeld::storage::q8_0, newest};
      chunked_engine ours(models.ours, p, {{.slots = 48}}, 512, {1, 0}, angles::ours, rows);
      auto parameters = exact_parameters(512, chunk);
      parameters.type_k = parameters.type_v = cells;
      compressed_llama kv(models.theirs.get(), p,
                          {.how = mode::own_attention,
                           .limits = {{.slots = 48}},
                           .untouched = {0},
                           .capacity = 512,
                           .rows = rows},
                          parameters);
      ours.decode(text), kv.decode(text);
      for (index_t l = 0; l < 2; ++l) {
        for (index_t h = 0; h < 2; ++h) {
          const auto mean = kv.kv.held().head(l, h).key_mean(), wanted = ours.head(l, h).key_mean();
          REQUIRE(mean.size() == 16);
          for (std::size_t i = 0; i < 16; ++i) {  // pairs are side by side in llama.cpp
            CHECK(static_cast<float>(mean[i]) ==
                  Approx(static_cast<float>(wanted[i / 2 + i % 2 * 8])).margin(0.02));
          }
        }
      }
    }
  }
}

TEST_CASE("llama.cpp: a share is of the bytes that the capacity takes in 16 bits") {
  const twin models;
  const auto slots = [&](const kvmeld::llama::options& o) {
    return compressed_llama(models.theirs.get(), policy_named("fold"), o, exact_parameters(256, 64))
        .kv.slots();
  };
  using kvmeld::make_storage;
  const auto with = [&](budget limit, double share, const char* rows) {
    return slots({.how = mode::own_attention,
                  .limits = {limit},
                  .capacity = 1025,
                  .share = share,
                  .rows = make_storage(rows)});
  };
  CHECK(with({.is_shared = true}, 0.25, "half") ==
        with(budget::shared_bytes(half_bytes(1024) / 4), 0, "half"));
  CHECK(with({.is_shared = true}, 0.25, "half") <
        256);  // log-mass, positions and state are counted
  CHECK(with({.is_shared = true}, 0.25, "k4v4") > 1.3 * with({.is_shared = true}, 0.25, "half"));
  CHECK(with(budget::shared(100), 0, "k4v4") == 100);
  CHECK(with({.slots = 100}, 0, "half") == 100);
  CHECK(with({.is_shared = true}, 1, "half") == 1024);  // all, whatever else is held beside
}

TEST_CASE("llama.cpp: sequences in few bits are copied, saved and loaded") {
  const twin models;
  const auto text = draw_tokens(prompt + 24, models.shape.vocab);
  announced_llama kv(models.theirs.get(), policy_named("fold"),
                     {.how = mode::own_attention,
                      .limits = {{.is_shared = true}},
                      .capacity = 513,
                      .share = 0.3,
                      .rows = kvmeld::make_storage("k6v4:newest=8")},
                     parameters_for(3));
  for (index_t at = 0; at < prompt; at += chunk) {
    kv.decode(tokens_of(text, at, chunk));
  }
  kv.kv.end_prompt(0);
  kv.kv.copy(0, 1);
  std::stringstream bytes;
  kv.kv.save(bytes, 0);
  kv.kv.load(bytes, 2);
  for (index_t at = prompt; at < prompt + 24; ++at) {
    const auto first = kv.decode(tokens_of(text, at, 1));
    CHECK(kv.decode(tokens_of(text, at, 1, 1)) == first);
    CHECK(kv.decode(tokens_of(text, at, 1, 2)) == first);
  }
}

}  // namespace rows_test
