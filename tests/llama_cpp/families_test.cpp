// SPDX-License-Identifier: MIT
// Models of other families than the llama's: their full layers are compressed, as llama.cpp's own
// attention without the evicted slots says; windowed layers stay the engine's.
#include "llama_cpp/families.hpp"

#include <catch2/catch.hpp>

namespace {

using namespace test;
using kvmeld::llama::mode;

constexpr index_t chunk = 64, slots = 48, cells = 256;

/// Chunks of a text, and behind every fourth of them single tokens.
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
  float own = 0, effect = 0;
};

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
  CHECK(r.slots == slots);
  CHECK(r.cells == (how == mode::repack ? slots : std::max(f.window, 1)));
  return d;
}

}  // namespace

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
      // Flash attention casts the rows of windowed layers to halves.
      CHECK(most < (how == mode::own_attention && f.window > 0 ? 0.05F : 1e-3F));
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
        CAPTURE(d.own, d.effect);
        CHECK(d.own < (how == mode::own_attention && f.window > 0 ? 0.05F : 1e-3F));
        CHECK(d.effect > 0.5F);
      }
    }
  }
}
