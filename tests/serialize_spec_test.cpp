// SPDX-License-Identifier: MIT
// What a model computes beside products is saved with a request, and compared.
#include <catch2/catch.hpp>
#include <kvmeld/kvmeld.hpp>
#include <sstream>
#include <vector>

#include "support/fixtures.hpp"

namespace serialize_spec_test {

TEST_CASE("a request is not loaded into another cap, other sinks or slopes",
          "[serialize][errors]") {
  const kvmeld::attention_spec plain{.kv_heads = 2, .group = 2, .key_dim = 4};
  const auto change = [&](auto f) {
    auto s = plain;
    f(s);
    return s;
  };
  const std::vector<kvmeld::attention_spec> specs = {
      plain,
      change([](auto& s) { s.soft_cap = 50; }),
      change([](auto& s) {
        s.sink_logits = {1, 2, 3, 4};
      }),
      change([](auto& s) {
        s.sink_logits = {1, 2, 3, 5};
      }),
      change([](auto& s) {
        s.sink_logits = {0, 0, 0, 0};  // that each take a share of attention
      }),
      change([](auto& s) {
        s.alibi_slopes = {.5F, .25F, .125F, .0625F};
      })};
  for (std::size_t from = 0; from < specs.size(); ++from) {
    for (std::size_t to = 0; to < specs.size(); ++to) {
      CAPTURE(from, to);
      kvmeld::cache one(specs[from], {.capacity = 16}), other(specs[to], {.capacity = 16});
      kvmeld::compressor saves(one, kvmeld::h2o{}, kvmeld::budget{12});
      kvmeld::compressor loads(other, kvmeld::h2o{}, kvmeld::budget{12});
      one.append(one.heads(0, 0), fixtures::normal(5 * 8), fixtures::normal(5 * 8), 5);
      std::stringstream bytes;
      saves.save(bytes, 0);
      if (from == to) {
        loads.load(bytes, 0);
        CHECK(other.head(1).length() == 5);
      } else {
        CHECK_THROWS_WITH(loads.load(bytes, 0), Catch::Contains("load: expected"));
        CHECK(other.head(1).length() == 0);
      }
    }
  }
}

TEST_CASE("every layer's attention is compared, and its rotation by what it turns",
          "[serialize][errors]") {
  const auto layer = [](auto f) {
    kvmeld::attention_spec s{.kv_heads = 2, .group = 2, .key_dim = 4};
    s.rope = kvmeld::rotary::halves(10'000);
    f(s);
    return s;
  };
  const auto plain = layer([](auto&) {});
  const std::vector<kvmeld::attention_spec> others = {
      layer([](auto& s) { s.soft_cap = 50; }),
      layer([](auto& s) { s.scale = 0.25F; }),
      layer([](auto& s) {
        s.sink_logits = {1, 2, 3, 4};
      }),
      layer([](auto& s) {
        s.alibi_slopes = {.5F, .25F, .125F, .0625F};
      }),
      layer([](auto& s) { s.window = 8; }),
      layer([](auto& s) { s.rope = {}; }),
      layer([](auto& s) { s.rope = kvmeld::rotary::halves(20'000); }),
      layer([](auto& s) { s.rope = kvmeld::rotary::interleaved(10'000); }),
      layer([](auto& s) { s.rope = kvmeld::rotary::halves(10'000).dims(2); }),
      layer([](auto& s) { s.rope = kvmeld::rotary::halves(10'000).dims(2).last(); }),
      layer([](auto& s) { s.rope = kvmeld::rotary::halves(10'000).linear(2); }),
  };
  const auto loads = [](const std::vector<kvmeld::attention_spec>& from,
                        const std::vector<kvmeld::attention_spec>& to, kvmeld::index_t tokens) {
    const auto layers = static_cast<kvmeld::index_t>(from.size());
    kvmeld::cache one(from, {.layers = layers, .capacity = 16}),
        other(to, {.layers = layers, .capacity = 16});
    kvmeld::compressor saves(one, kvmeld::tova{}, kvmeld::budget{12});
    kvmeld::compressor takes(other, kvmeld::tova{}, kvmeld::budget{12});
    for (kvmeld::index_t l = 0; l < layers && tokens > 0; ++l) {
      one.append(one.heads(l, 0), fixtures::normal(tokens * 8), fixtures::normal(tokens * 8),
                 tokens);
    }
    std::stringstream bytes;
    saves.save(bytes, 0);
    takes.load(bytes, 0);
    CHECK(other.head(other.heads() - 1).length() == tokens);
  };
  for (const kvmeld::index_t tokens : {5, 0}) {  // of an empty request too
    for (const auto& changed : others) {
      CHECK_THROWS_WITH(loads({plain, plain, plain}, {plain, changed, plain}, tokens),
                        Catch::Contains("load: expected"));
      CHECK_THROWS_WITH(loads({plain, plain, changed}, {plain, plain, plain}, tokens),
                        Catch::Contains("load: expected"));
      CHECK_NOTHROW(loads({plain, changed}, {plain, changed}, tokens));
    }
  }
  const std::vector<double> frequencies = {1, 0.01};  // said in another way, and the same
  CHECK_NOTHROW(loads({plain}, {layer([&](auto& s) {
                        s.rope =
                            kvmeld::rotary::table(frequencies, kvmeld::rotary::pairing::halves);
                      })},
                      5));
}

}  // namespace serialize_spec_test
