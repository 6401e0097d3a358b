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
      plain, change([](auto& s) { s.soft_cap = 50; }), change([](auto& s) {
        s.sink_logits = {1, 2, 3, 4};
      }),
      change([](auto& s) {
        s.sink_logits = {1, 2, 3, 5};
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

}  // namespace serialize_spec_test
