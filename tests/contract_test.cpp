// SPDX-License-Identifier: MIT
// What an engine's author writes, block by block, as the guides show it.
#include <algorithm>  // std::max, std::ranges::fill
#include <catch2/catch.hpp>
#include <numeric>  // std::iota
#include <sstream>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"

namespace contract_test {

using fixtures::normal;
using kvmeld::index_t;

constexpr index_t layers = 2, requests = 3, kv_heads = 2, group = 2, dim = 32, tokens = 120;

kvmeld::attention_spec model() {
  kvmeld::attention_spec spec{.kv_heads = kv_heads, .group = group, .key_dim = dim};
  spec.rope = kvmeld::rotary::halves(500'000.0);
  return spec;
}

/// Rows of a step, or of a prompt's layer: queries, keys and values.
struct rows_of {
  std::vector<float> q, k, v;

  explicit rows_of(index_t count)
      : q(normal(count * kv_heads * group * dim)),
        k(normal(count * kv_heads * dim)),
        v(normal(count * kv_heads * dim)) {}
};

/// A prompt of every layer of a request.
void read_prompt(auto& kv, auto& meld, index_t request) {
  const kvmeld::attention_spec spec = model();
  for (index_t layer = 0; layer < layers; ++layer) {
    const rows_of x(tokens);
    kv.append(kv.heads(layer, request), x.k, x.v, tokens);
    meld.prompt(kv.heads(layer, request), kvmeld::queries(x.q, tokens, spec));
  }
  meld.end_prompt(request);
}

index_t slots_of(auto& kv, index_t request) {
  index_t sum = 0;
  for (index_t layer = 0; layer < layers; ++layer) {
    for (index_t h = 0; h < kv_heads; ++h) {
      sum += kv.head(kv.heads(layer, request)[h]).length();
    }
  }
  return sum;
}

TEST_CASE("contract: a layer as the model computes it", "[contract]") {
  kvmeld::attention_spec spec{.kv_heads = 8, .group = 4, .key_dim = 128};
  spec.rope = kvmeld::rotary::halves(500'000.0);
  CHECK_NOTHROW(kvmeld::cache(spec, {.capacity = 4}));
  spec.rope = kvmeld::rotary::interleaved(10'000.0).dims(64).linear(4);
  CHECK_NOTHROW(kvmeld::cache(spec, {.capacity = 4}));
  spec.soft_cap = 50;
  CHECK_NOTHROW(kvmeld::cache(spec, {.capacity = 4}));
}

TEST_CASE("contract: memory of the cache's own, and of an engine", "[contract]") {
  const kvmeld::attention_spec spec = model();
  const index_t cells = 64;
  kvmeld::cache kv(spec, {.layers = 2, .requests = 3, .capacity = 640});
  kvmeld::cache half(spec, {.layers = 2,
                            .requests = 3,
                            .capacity = 640,
                            .keys = kvmeld::storage::f16,
                            .values = kvmeld::storage::f16});
  CHECK(half.head(0).type() == kvmeld::storage::f16);
  CHECK(kv.heads() == half.heads());
  std::vector<Eigen::half> k(static_cast<std::size_t>(cells * kv_heads * dim)), v = k;
  kvmeld::strided_cache over(spec, {.layers = 1, .requests = 1, .capacity = cells},
                             kvmeld::rows(k, kvmeld::layout::nhd),
                             kvmeld::rows(v, kvmeld::layout::nhd));
  CHECK(over.head(0).capacity() == cells);
}

TEST_CASE("contract: one policy and budget, one made from text, one shared budget", "[contract]") {
  const kvmeld::attention_spec spec = model();
  kvmeld::cache kv(spec, {.layers = layers, .requests = requests, .capacity = 160});
  SECTION("of its own") {
    kvmeld::compressor meld(kv, kvmeld::fold{}, kvmeld::budget{.slots = 64});
    read_prompt(kv, meld, 0);
    CHECK(slots_of(kv, 0) <= 64 * layers * kv_heads);
  }
  SECTION("from text, with a trigger") {
    kvmeld::compressor any(kv, kvmeld::make_policy("h2o:recent=0.25"),
                           {.slots = 64, .trigger = 80});
    read_prompt(kv, any, 0);
    CHECK(slots_of(kv, 0) == 64 * layers * kv_heads);
  }
  SECTION("shared: so many a head on average, divided over the model") {
    kvmeld::compressor best(kv, kvmeld::fold{}, kvmeld::budget::shared(64));
    read_prompt(kv, best, 0);
    CHECK(slots_of(kv, 0) <= 64 * layers * kv_heads);
    CHECK(slots_of(kv, 0) > 60 * layers * kv_heads);
    const index_t first = kv.head(kv.heads(0, 0)[0]).length();
    bool equal = true;
    for (index_t h = 0; h < layers * kv_heads; ++h) {
      equal = equal && kv.head(kv.heads(h / kv_heads, 0)[h % kv_heads]).length() == first;
    }
    CHECK_FALSE(equal);
  }
}

TEST_CASE("contract: a prompt in chunks, with the prefill's log-sum-exp, and steps", "[contract]") {
  const kvmeld::attention_spec spec = model();
  kvmeld::cache kv(spec, {.layers = layers, .requests = requests, .capacity = 160});
  kvmeld::compressor meld(kv, kvmeld::snapkv{}, kvmeld::budget{.slots = 64});
  for (const index_t request : {0, 2}) {
    for (index_t layer = 0; layer < layers; ++layer) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        const rows_of x(tokens / 2);
        kv.append(kv.heads(layer, request), x.k, x.v, tokens / 2);
        meld.prompt(kv.heads(layer, request), kvmeld::queries(x.q, tokens / 2, spec));
      }
    }
    meld.end_prompt(request);
    meld.end_prompt(request);  // nothing is left to do
    CHECK(slots_of(kv, request) == 64 * layers * kv_heads);
  }
  const std::vector<index_t> active = {0, 2};
  std::vector<float> out(active.size() * kv_heads * group * dim);
  for (index_t layer = 0; layer < layers; ++layer) {
    const rows_of x(static_cast<index_t>(active.size()));
    meld.step(kv.heads(layer, active), {x.q, x.k, x.v}, out);
    CHECK(std::ranges::all_of(out, [](float e) { return std::isfinite(e); }));
  }
  CHECK(slots_of(kv, 1) == 0);
}

TEST_CASE("contract: the engine's own attention", "[contract]") {
  const kvmeld::attention_spec spec = model();
  kvmeld::cache kv(spec, {.layers = layers, .requests = requests, .capacity = 160});
  const kvmeld::observation_needs given{.probabilities = true};
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{.slots = 64}, given);
  read_prompt(kv, meld, 1);
  const rows_of x(1);
  const auto heads = kv.heads(0, 1);
  index_t longest = 0;
  kv.append(heads, x.k, x.v, 1);
  for (index_t i = 0; i < heads.count(); ++i) {
    longest = std::max(longest, kv.head(heads[i]).length());
  }
  const std::vector<float> p(static_cast<std::size_t>(kv_heads * group * longest),
                             1.0F / static_cast<float>(longest));
  meld.observe(heads, {.probabilities = p});
  std::vector<index_t> lengths(kv_heads);
  meld.compress(heads, lengths);
  CHECK(*std::ranges::max_element(lengths) <= 64);
  // What a policy lacks is refused by name when the compressor is made.
  CHECK_THROWS_WITH(
      kvmeld::compressor(kv, kvmeld::expected_attention{}, kvmeld::budget{.slots = 64}, given),
      Catch::Contains("expected_attention") && Catch::Contains("query"));
}

TEST_CASE("contract: speculation", "[contract]") {
  const kvmeld::attention_spec spec = model();
  kvmeld::cache kv(spec, {.layers = layers, .requests = requests, .capacity = 160});
  kvmeld::compressor meld(kv, kvmeld::zsmerge{}, kvmeld::budget{.slots = 64});
  read_prompt(kv, meld, 0);
  const index_t before = kv.head(0).next_position();
  std::vector<float> out(4 * kv_heads * group * dim);
  for (index_t layer = 0; layer < layers; ++layer) {
    const rows_of x(4);
    meld.draft(kv.heads(layer, 0), {x.q, x.k, x.v}, out, 4);
  }
  CHECK(kv.head(0).next_position() == before);
  meld.accept(0, 2);
  CHECK(kv.head(0).next_position() == before + 2);
}

TEST_CASE("contract: requests, and memory that is given back", "[contract]") {
  const kvmeld::attention_spec spec = model();
  kvmeld::cache kv(spec, {.layers = layers, .requests = requests, .capacity = 160});
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{.slots = 64});
  read_prompt(kv, meld, 0);
  std::stringstream file;
  meld.save(file, 0);
  meld.copy(0, 1);
  meld.clear(0);
  CHECK(slots_of(kv, 0) == 0);
  meld.load(file, 2);
  CHECK(slots_of(kv, 2) == slots_of(kv, 1));
  kv.shrink(meld, 96);
  CHECK(kv.capacity() == 96);
  CHECK(slots_of(kv, 2) == 64 * layers * kv_heads);

  const index_t slots = 8, pages = 20;
  std::vector<float> k(static_cast<std::size_t>(pages * slots * kv_heads * dim)), v = k;
  std::vector<index_t> table(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  kvmeld::paged_cache paged(spec, {.layers = 1, .requests = 1, .capacity = slots * pages},
                            kvmeld::rows(k, kvmeld::layout::pages_nhd),
                            kvmeld::rows(v, kvmeld::layout::pages_nhd),
                            {.pages = table, .slots = slots});
  kvmeld::compressor short_of_memory(paged, kvmeld::streaming_llm{}, kvmeld::budget{.slots = 60});
  const rows_of x(tokens);
  const auto heads = paged.heads(0, 0);
  paged.append(heads, x.k, x.v, tokens);
  CHECK(paged.free_pages(heads).size() == 5);
  short_of_memory.end_prompt(0);
  CHECK(paged.free_pages(heads).size() == 12);  // 60 slots take 8 pages of 20
}

}  // namespace contract_test
