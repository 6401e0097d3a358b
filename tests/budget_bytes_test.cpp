// SPDX-License-Identifier: MIT
// Budgets in bytes: as many slots as fit, no more.
#include <catch2/catch.hpp>
#include <cstdint>
#include <vector>

#include "kvmeld/kvmeld.hpp"
#include "support/model.hpp"

namespace budget_bytes_test {

using namespace small_model;
using Catch::Contains;
using kvmeld::any_policy;
using kvmeld::budget;

constexpr index_t tokens = 300, capacity = 320;

kvmeld::cache made(const kvmeld::storage_pair& type) {
  return {layer_spec,
          {.layers = layers_of,
           .requests = requests_of,
           .capacity = capacity,
           .keys = type.keys,
           .values = type.values,
           .newest = type.newest}};
}

/// What request 0 of `kv` holds, by loops of its own: rows, log-mass and position, state.
template <class Meld>
std::int64_t held(kvmeld::cache& kv, const Meld& meld) {
  std::int64_t sum = 0;
  for (index_t l = 0; l < layers_of; ++l) {
    for (const index_t h : kv.heads(l, 0)) {
      const index_t n = kv.head(h).length();
      sum += static_cast<std::int64_t>(kvmeld::head_bytes(kv.type(), dim, dim, n)) + n * 8;
      // Awake, as before a plan.
      sum += 4 * (n * meld.state(h).slot_stats() +
                  static_cast<std::int64_t>(meld.state(h).memory_size()));
    }
  }
  return sum;
}

template <class Meld>
void read_and_decode(kvmeld::cache& kv, Meld& meld, index_t steps) {
  for (index_t l = 0; l < layers_of; ++l) {
    const auto heads = kv.heads(l, 0);
    kv.append(heads, normal(tokens * kv_heads_of * dim), normal(tokens * kv_heads_of * dim),
              tokens);
    meld.prompt(heads,
                kvmeld::queries(normal(tokens * kv_heads_of * group * dim), tokens, layer_spec));
  }
  meld.end_prompt(0);
  std::vector<float> out(static_cast<std::size_t>(kv_heads_of * group * dim));
  for (index_t t = 0; t < steps; ++t) {
    for (index_t l = 0; l < layers_of; ++l) {
      meld.step(
          kv.heads(l, 0),
          {normal(kv_heads_of * group * dim), normal(kv_heads_of * dim), normal(kv_heads_of * dim)},
          out);
    }
  }
}

TEST_CASE("a budget in bytes is kept, and a slot more a head would not fit") {
  using kvmeld::storage;
  const auto type = GENERATE(kvmeld::storage_pair{storage::f32, storage::f32},
                             kvmeld::storage_pair{storage::f16, storage::f16},
                             kvmeld::storage_pair{storage::q8_0, storage::q8_0},
                             kvmeld::storage_pair{storage::k6, storage::q4_0, 16});
  const bool shared = GENERATE(false, true);
  const index_t slack = GENERATE(0, 20);
  for (const any_policy& p :
       {any_policy(kvmeld::fold{}), any_policy(kvmeld::h2o{}), any_policy(kvmeld::snapkv{}),
        any_policy(kvmeld::keepkv{}), any_policy(kvmeld::ems{})}) {
    if (shared && !kvmeld::declared(p).shares()) {
      continue;
    }
    CAPTURE(p.name(), shared, slack, type.newest);
    kvmeld::cache kv = made(type);
    const std::int64_t heads = layers_of * kv_heads_of, bytes = 150'000;
    const budget limit = shared ? budget::shared_bytes(bytes, slack) : budget::bytes(bytes, slack);
    kvmeld::compressor meld(kv, p, limit);
    index_t slots = 0;
    for (index_t l = 0; l < layers_of; ++l) {
      for (const index_t h : kv.heads(l, 0)) {
        slots += meld.limit(h).trigger_length() - 1;
      }
    }
    const index_t each = slots / static_cast<index_t>(heads);
    REQUIRE(slots == each * heads);
    CHECK(each > slack);
    const auto of = [&](index_t n) {
      const auto& state = meld.state(0);
      return heads * (static_cast<std::int64_t>(kvmeld::head_bytes(type, dim, dim, n)) +
                      n * (8 + 4 * state.slot_stats()) +
                      4 * static_cast<std::int64_t>(state.memory_size()));
    };
    CHECK(of(each) <= bytes);
    CHECK((of(each + 1) > bytes || each == capacity - 1));
    read_and_decode(kv, meld, 2 * slack + 10);
    CHECK(held(kv, meld) <= bytes);
    CHECK((held(kv, meld) > bytes - of(each) / each * 20 || each == capacity - 1));
  }
}

TEST_CASE("a tenth of a prompt's bytes is a tenth of its slots, less what the state takes") {
  kvmeld::attention_spec model{.kv_heads = 8, .group = 4, .key_dim = 128};
  kvmeld::cache kv(model, {.layers = 32,
                           .capacity = 4097,
                           .keys = kvmeld::storage::f16,
                           .values = kvmeld::storage::f16});
  const auto bytes = kvmeld::bytes_in_half(kv, 4096) / 10;
  const kvmeld::compressor meld(kv, kvmeld::fold{}, budget::shared_bytes(bytes));
  const index_t slots = meld.limit(0).trigger_length() - 1;
  CHECK(slots > 330);
  CHECK(slots < 400);
}

TEST_CASE("a budget of more bytes than a cache can hold keeps all that it can") {
  kvmeld::cache kv = made(kvmeld::storage::f32);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::bytes(std::int64_t{1} << 40));
  CHECK(meld.limit(0).trigger_length() == capacity);
}

TEST_CASE("bytes_in_half: two bytes a number of every layer without a window") {
  kvmeld::cache kv = made(kvmeld::storage::f32);
  CHECK(kvmeld::bytes_in_half(kv, 100) == 100 * layers_of * kv_heads_of * (dim + dim) * 2);
  CHECK(kvmeld::bytes_in_half(kv, 0) == 0);
  CHECK_THROWS_WITH(kvmeld::bytes_in_half(kv, -1), Contains("at least 0 tokens, got -1"));
  kvmeld::attention_spec windowed = layer_spec;
  windowed.window = 50;
  kvmeld::cache both(std::vector{layer_spec, windowed}, {.layers = 2, .capacity = 100});
  CHECK(kvmeld::bytes_in_half(both, 100) == 100 * kv_heads_of * (dim + dim) * 2);
  // The layer with the window keeps it, and is not counted.
  kvmeld::compressor meld(both, kvmeld::h2o{}, budget::bytes(20'000));
  const std::int64_t each = 2 * dim * 4 + 8 + 4 * meld.state(0).slot_stats();
  CHECK(meld.limit(0).trigger_length() - 1 == 20'000 / (kv_heads_of * each));
}

TEST_CASE("budgets in bytes that cannot be are refused") {
  kvmeld::cache kv = made(kvmeld::storage::f32);
  using kvmeld::compressor, kvmeld::fold, kvmeld::h2o;
  CHECK_THROWS_WITH(compressor(kv, h2o{}, budget::bytes(100)),
                    Contains("compressor: expected a budget of at least ") &&
                        Contains(" heads, and its slack), got 100"));
  CHECK_THROWS_WITH(compressor(kv, h2o{}, budget::bytes(2'000)),
                    Contains("h2o: expected a budget of at least "));
  CHECK_THROWS_WITH(compressor(kv, fold{}, budget::shared_bytes(4'000)),
                    Contains("fold: expected at least ") && Contains(" slots to share, got "));
  CHECK_THROWS_WITH(compressor(kv, h2o{}, budget::bytes(100'000, -5)),
                    Contains("a slack of at least 0 slots, got -5"));
  CHECK_THROWS_WITH(compressor(kv, h2o{}, budget::bytes(-5)), Contains(", got -5"));
  CHECK_THROWS_WITH(compressor(kv, h2o{}, budget{.slots = 5, .size = 100'000}),
                    Contains("expected bytes without slots and trigger, got 5 and 0"));
  CHECK_THROWS_WITH(compressor(kv, h2o{}, budget{.trigger = 9, .size = 100'000}),
                    Contains("expected bytes without slots and trigger, got 0 and 9"));
  const std::vector<budget> each(layers_of * kv_heads_of, budget::bytes(100'000));
  CHECK_THROWS_WITH(compressor(kv, h2o{}, std::span<const budget>(each)),
                    Contains("one policy and one budget for all heads"));
}

}  // namespace budget_bytes_test
