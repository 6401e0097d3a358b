// SPDX-License-Identifier: MIT
// Memory that is held only where it is in use, as the system counts it.
#ifdef __linux__
#include <malloc.h>  // malloc_trim
#endif

#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kvmeld/any_policy.hpp"
#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/memory/reserved.hpp"
#include "kvmeld/score/queries.hpp"
#include "support/sanitized.hpp"

namespace resident_test {

using kvmeld::budget;
using kvmeld::cache;
using kvmeld::index_t;
using kvmeld::storage;
using kvmeld::detail::reserved;

/// Bytes that this process has written and are in memory; 0: the system does not say, or memory is
/// watched. `statm` counts by the processor, and is wrong by as many as 64 pages for each.
std::size_t resident() {
#ifdef __SANITIZE_THREAD__
  return 0;
#endif
  std::ifstream maps("/proc/self/smaps_rollup");
  for (std::string word; !fixtures::sanitized && maps >> word;) {
    if (std::size_t kib = 0; word == "Anonymous:" && maps >> kib) {
      return kib * 1024;
    }
  }
  return 0;
}

constexpr std::size_t mib = 1 << 20;

TEST_CASE("reserved memory is held from its first write to when it is cleared", "[memory]") {
  reserved block(64 * mib);
  REQUIRE(block.size() == 64 * mib);
#if KVMELD_MAPS_MEMORY
  CHECK(block.held() == 0);
  std::memset(block.data() + 8 * mib, 1, 16 * mib);
  CHECK(block.held() == 16 * mib);
  block.clear(8 * mib + 1, 24 * mib - 1);
  CHECK((block.held() > 0 && block.held() <= mib / 8));  // two pages
  const reserved moved = std::move(block);
  CHECK((block.data() == nullptr && block.size() == 0 && moved.held() <= mib / 8));
#endif
}

TEST_CASE("what is cleared is 0, and what lies around it is not", "[memory]") {
  for (const std::size_t size : {std::size_t{100}, std::size_t{1000}, mib + 3}) {
    for (const auto& [from, to] :
         {std::pair(std::size_t{7}, size - 9), std::pair(std::size_t{64}, size),
          std::pair(size / 2, size / 2), std::pair(std::size_t{0}, size)}) {
      reserved block(size);
      std::memset(block.data(), 1, size);
      block.clear(from, to);
      std::vector<std::byte> expected(size, std::byte{1});
      std::fill(expected.begin() + static_cast<std::ptrdiff_t>(from),
                expected.begin() + static_cast<std::ptrdiff_t>(to), std::byte{0});
      REQUIRE(std::memcmp(block.data(), expected.data(), size) == 0);
      REQUIRE(reinterpret_cast<std::uintptr_t>(block.data()) % 64 == 0);
    }
  }
}

/// Prompts through a few layers, at a budget of 10 %.
struct model {
  static constexpr index_t group = 2, dim = 128, count = 16;

  index_t layers, heads, tokens;
  kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};
  std::vector<float> k, v, q, out;

  model() : model(2, 4, 2048) {}
  model(index_t layer_count, index_t head_count, index_t token_count)
      : layers(layer_count),
        heads(head_count),
        tokens(token_count),
        k(numbers(tokens * heads * dim, 1)),
        v(numbers(tokens * heads * dim, 2)) {
    q = numbers(count * heads * group * dim, 3), out.resize(kvmeld::as_size(heads, group, dim));
    spec.rope = kvmeld::rotary::halves(10'000);
  }
  static std::vector<float> numbers(index_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(kvmeld::as_size(n));
    for (float& y : x) {
      y = normal(random);
    }
    return x;
  }
  cache empty(storage type, index_t requests = 1) const {
    return {spec,
            {.layers = layers,
             .requests = requests,
             .capacity = tokens + 64,
             .keys = type,
             .values = type}};
  }
  void prompt(auto& kv, auto& meld, index_t request) const {
    for (index_t l = 0; l < layers; ++l) {
      kv.append(kv.heads(l, request), k, v, tokens);
      meld.prompt(kv.heads(l, request), kvmeld::queries(q, count, spec));
    }
  }
  void step(cache& kv, auto& meld, index_t request) {
    for (index_t l = 0; l < layers; ++l) {
      meld.step(kv.heads(l, request),
                {std::span(q).first(out.size()), std::span(k).first(kvmeld::as_size(heads, dim)),
                 std::span(v).first(kvmeld::as_size(heads, dim))},
                out);
    }
  }
};

/// After prompt and steps, the process has hardly more than what is in use.
void check_resident(model& m, const kvmeld::any_policy& policy, const budget& b, storage type) {
  cache kv = m.empty(type, 2);
  kvmeld::compressor meld(kv, policy, b);
  const auto finish = [&](index_t request) {
    meld.end_prompt(request);
    for (int t = 0; t < 4; ++t) {
      m.step(kv, meld, request);
    }
  };
  // What is allocated once: scratch of one head for a prompt and for a plan of decode, a quarter of
  // all here.
  m.prompt(kv, meld, 0), finish(0), meld.clear(0);
  const auto reserved_now = [&] {
    return static_cast<double>(kv.reserved_bytes() + meld.reserved_bytes());
  };
  // The heap keeps freed blocks below those in use: of so small a model a quarter.
  const auto resident_trimmed = [] {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    return resident();
  };
  const double reserved_before = reserved_now();
  const std::size_t before = resident_trimmed();
  m.prompt(kv, meld, 1);
  const double whole = static_cast<double>(kv.bytes() + meld.bytes());
  if (before > 0) {
    CHECK(static_cast<double>(resident() - before) > 0.9 * whole);
  }
  finish(1);
  const double held = reserved_now() - reserved_before,
               used = static_cast<double>(kv.bytes() + meld.bytes());
  CHECK(used < 0.15 * whole);
  CHECK((!KVMELD_MAPS_MEMORY || held <= 1.25 * used));
  if (before > 0) {
    CHECK(static_cast<double>(resident_trimmed()) <= static_cast<double>(before) + 1.25 * used);
  }
  meld.clear(1);
  CHECK((!KVMELD_MAPS_MEMORY || reserved_now() - reserved_before <= 0.2 * used));
  CHECK((!KVMELD_MAPS_MEMORY || reserved_before <= 0.2 * used));
}

TEST_CASE("with slack slots a prompt leaves hardly any state behind", "[memory]") {
  constexpr index_t slots = 100;
  model m;
  const std::size_t all = kvmeld::as_size(m.layers, m.heads);
  const auto run = [&](const auto& policy, std::size_t of_head, bool rests) {
    cache kv = m.empty(storage::q8_0);
    kvmeld::compressor meld(kv, policy, budget{.slots = slots, .slack = 70});
    m.prompt(kv, meld, 0);
    meld.end_prompt(0);
    CHECK((meld.bytes() == all * of_head) == rests);
    if (KVMELD_MAPS_MEMORY && rests) {
      CHECK(meld.reserved_bytes() <= all * 4096);
      CHECK((of_head > 0 || meld.reserved_bytes() == 0));
    }
    while (kv.head(0).length() < slots + 70) {
      m.step(kv, meld, 0);
    }
    CHECK(meld.bytes() > all * slots * sizeof(float));
  };
  kvmeld::fold by_scores;
  by_scores.pins = kvmeld::fold::pin_rule::scores;
  run(by_scores, 8 + 2 * 2 * slots, true);
  run(kvmeld::fold(), 8 + 2 * slots, true);
  run(kvmeld::snapkv(), 0, true);
  run(kvmeld::massfold{kvmeld::snapkv()}, 0, true);
  run(kvmeld::h2o(), 0, false);
}

TEST_CASE("queries that were held for a prompt are given back whatever lies after them",
          "[memory]") {
  constexpr index_t count = 256, group = 2, dim = 128;
  const std::vector<float> q = model::numbers(count * group * dim, 1);
  const kvmeld::query_view<float> all{
      .data = q.data(), .count = count, .head = 0, .group = dim, .row = group * dim};
  { const std::vector<char> once(4 * mib); }  // heaps keep blocks of its size from here on
  std::vector<kvmeld::held_queries> heads(128);
  std::vector<std::vector<char>> between;
  const std::size_t before = resident();
  for (kvmeld::held_queries& held : heads) {
    held.keep(all, 0, group, dim, {.plans = kvmeld::prompt_use::planned::lookahead});
    between.emplace_back(1000);
  }
  const std::size_t bytes = heads.size() * q.size() * sizeof(float);
  if (before > 0) {
    CHECK(resident() - before > bytes / 10 * 9);
  }
  for (kvmeld::held_queries& held : heads) {
    held.release();
  }
  if (before > 0 && KVMELD_MAPS_MEMORY) {
    CHECK(resident() < before + bytes / 10);
  }
}

TEST_CASE("a copy of a cache and of a state holds what is in use", "[memory]") {
  model m;
  cache kv = m.empty(storage::f32);
  kvmeld::compressor meld(kv, kvmeld::h2o(), budget{.slots = 100});
  m.prompt(kv, meld, 0);
  kv.head(0).truncate(100);
  const cache copy = kv;
  CHECK((!KVMELD_MAPS_MEMORY || copy.reserved_bytes() < kv.reserved_bytes()));
  kv.give_back(0);
  CHECK((copy.bytes() == kv.bytes() && copy.reserved_bytes() <= kv.reserved_bytes()));
  cache other = copy;
  CHECK(other.head(0).key(99)[7] == kv.head(0).key(99)[7]);
  CHECK(other.head(5).value(1000)[3] == kv.head(5).value(1000)[3]);
  CHECK(other.head(5).position(1000) == 1000);
}

TEST_CASE("an engine's rows are not shrunk, and their records are given back", "[memory][errors]") {
  model m;
  std::vector<float> k(kvmeld::as_size(2, 4, 2048, 128)), v(k.size());
  kvmeld::strided_cache kv(m.spec, {.layers = 2, .requests = 1, .capacity = 2048},
                           kvmeld::rows(k, kvmeld::layout::hnd),
                           kvmeld::rows(v, kvmeld::layout::hnd));
  kvmeld::compressor meld(kv, kvmeld::h2o(), budget{.slots = 100});
  for (const auto& call :
       {std::function([&] { kv.shrink(meld, 200); }), std::function([&] { kv.shrink(200); }),
        std::function([&] { meld.shrink(kv, 200); })}) {
    CHECK_THROWS_WITH(call(), Catch::Contains("shrink: expected a kvmeld::cache, which owns its "
                                              "rows, got a strided_cache"));
  }
  m.prompt(kv, meld, 0);
  const std::size_t before = kv.reserved_bytes();
  meld.end_prompt(0);
  CHECK((!KVMELD_MAPS_MEMORY || kv.reserved_bytes() < before));
}

TEST_CASE("a compressed prompt's memory is given back at its end", "[memory]") {
  const auto type = GENERATE(storage::f32, storage::f16);
  CAPTURE(type);
  model m;
  check_resident(m, kvmeld::h2o(), budget{.slots = m.tokens / 10}, type);
  check_resident(m, kvmeld::fold(), budget::shared(m.tokens / 10), type);
}

/// 1.1 GB, a minute: `kvmeld_tests "[large]"`.
TEST_CASE("... of 32 layers of 8 heads and 4,096 tokens", "[.][large]") {
  model m(32, 8, 4096);
  check_resident(m, kvmeld::h2o(), budget{.slots = m.tokens / 10}, storage::f32);
  check_resident(m, kvmeld::fold(), budget::shared(m.tokens / 10), storage::f32);
}

}  // namespace resident_test
