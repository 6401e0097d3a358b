// SPDX-License-Identifier: MIT
// One pool of pages for all layers: the heads of a layer share a table, and hold equally many
// slots.
#include <algorithm>  // std::ranges::sort
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace one_pool_test {

using fixtures::normal;
using kvmeld::budget;
using kvmeld::index_t;

constexpr index_t layers = 3, requests = 2, kv_heads = 2, dim = 8, tokens = 92, mean = 48;
constexpr index_t slots = 4, entries = 24, pages = 3 * entries + 3 * entries;
const kvmeld::attention_spec spec{.kv_heads = kv_heads, .key_dim = dim};
const kvmeld::strides shared_pool{
    .head = dim, .row = kv_heads * dim, .page = slots * kv_heads * dim};

/// Every entry of every table has a page of its own, in no order.
std::vector<index_t> all_tables() {
  std::vector<index_t> x;
  for (index_t i = 0; i < layers * requests * entries; ++i) {
    x.push_back(i * 37 % pages);
  }
  return x;
}

struct engine {
  std::vector<float> k = std::vector<float>(pages * slots * kv_heads * dim), v = k;
  std::vector<index_t> tables = all_tables();
  kvmeld::paged_cache kv{spec,
                         {.layers = layers, .requests = requests, .capacity = slots * entries},
                         kvmeld::rows(k, shared_pool),
                         kvmeld::rows(v, shared_pool),
                         {.pages = tables, .slots = slots}};
};

bool evicts_by_score(const kvmeld::any_policy_or_peer& p) {
  return p.visit([](const auto& one) { return !kvmeld::detail::makes_plans<decltype(one)>; });
}

/// A prompt of request 1, the further a layer the larger its keys, and some steps.
void run(auto& kv, auto& meld) {
  streams::restart();
  for (index_t l = 0; l < layers; ++l) {
    auto k = normal(tokens * kv_heads * dim);
    for (float& x : k) {
      x *= 0.5F + static_cast<float>(l);
    }
    kv.append(kv.heads(l, 1), k, normal(tokens * kv_heads * dim), tokens);
    meld.prompt(kv.heads(l, 1), kvmeld::queries(normal(tokens * kv_heads * dim), tokens, spec));
  }
  meld.end_prompt(1);
  std::vector<float> out(kv_heads * dim);
  for (index_t t = 0; t < 5 && kvmeld::declared(meld.policy_of(0)).supports_decode(); ++t) {
    for (index_t l = 0; l < layers; ++l) {
      const auto x = normal(kv_heads * dim);
      meld.step(kv.heads(l, 1), {x, x, x}, out);
    }
  }
}

TEST_CASE("layers that take pages from one pool do what a cache of their own does", "[paged]") {
  const bool alike = GENERATE(false, true);
  for (const auto& example : fixtures::every_policy()) {
    if (!kvmeld::declared(example.policy).shares() ||
        (alike && !evicts_by_score(example.policy))) {  // refused
      continue;
    }
    CAPTURE(example.name, alike);
    const auto b = alike ? budget::same_tokens(mean) : budget::shared_by_layer(mean);
    engine e;
    kvmeld::cache own(spec, {.layers = layers, .requests = requests, .capacity = slots * entries});
    kvmeld::compressor meld(e.kv, example.policy, b), of_own(own, example.policy, b);
    run(e.kv, meld);
    run(own, of_own);
    index_t sum = 0, freed = 0;
    for (index_t l = 0; l < layers; ++l) {
      const auto heads = e.kv.heads(l, 1);
      const auto first = e.kv.head(heads[0]);
      for (index_t i = 0; i < kv_heads; ++i) {
        const auto head = e.kv.head(heads[i]);
        REQUIRE(head.length() == first.length());
        CHECK(fixtures::bytes_of(head) == fixtures::bytes_of(own.head(heads[i])));
        sum += head.length();
        for (index_t s = 0; alike && s < head.length(); ++s) {
          CHECK(head.position(s) == first.position(s));
        }
      }
      freed += static_cast<index_t>(e.kv.free_pages(heads).size());
    }
    CHECK(sum <= layers * kv_heads * mean);
    CHECK(freed >= layers * entries - layers * (mean / slots + 1));
    const bool equal =
        e.kv.head(e.kv.heads(0, 1)[0]).length() == e.kv.head(e.kv.heads(2, 1)[0]).length();
    CHECK((alike || !equal));  // means of heads may rank layers equally
    for (const index_t h : {0, 1}) {
      CHECK(e.kv.head(e.kv.heads(1, 0)[h]).length() == 0);
    }
  }
}

TEST_CASE("a page of one pool is in use by one layer", "[paged][errors]") {
  engine e;
  const auto x = normal(kv_heads * dim);
  e.kv.append(e.kv.heads(0, 0), x, x, 1);
  e.tables[2 * requests * entries] = e.tables[0];  // layer 2, request 0
  CHECK_THROWS_WITH(e.kv.append(e.kv.heads(2, 0), x, x, 1),
                    Catch::Contains("append: expected pages that no other table has in use"));
  CHECK_NOTHROW(e.kv.append(e.kv.heads(1, 0), x, x, 1));
}

TEST_CASE("layers that share a table lie apart in its pages", "[paged][errors]") {
  std::vector<float> k(pages * slots * kv_heads * dim), v = k;
  std::vector<index_t> tables(requests * entries);
  CHECK_THROWS_WITH(
      kvmeld::paged_cache(spec, {.layers = layers, .requests = requests, .capacity = 96},
                          kvmeld::rows(k, shared_pool), kvmeld::rows(v, shared_pool),
                          {.pages = tables, .slots = slots}),
      Catch::Contains("expected keys that do not overlap"));
}

}  // namespace one_pool_test
