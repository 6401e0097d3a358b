// SPDX-License-Identifier: MIT
// massfold on policies that evict: against its oracle, and what it leaves as it is. A scorer of
// its.
#include "kvmeld/policies/massfold.hpp"

#include <catch2/catch.hpp>

#include "support/agree.hpp"

namespace massfold_test {

using fixtures::agree;
using fixtures::index_t;
using kvmeld::any_massfold;
using kvmeld::budget;

TEST_CASE("massfold is its oracle", "[oracle]") {
  const auto cumulative = [](const oracle::slot& s) { return s.score; };
  const auto windowed = [](const oracle::slot& s) { return s.past + s.current; };
  for (const auto& s : fixtures::settings) {
    if (s.dim == 1) {
      continue;  // cosines of 1 or -1: rounding decides
    }
    const int recent = oracle::share(0.25, s.target);
    agree(any_massfold{kvmeld::h2o{.recent = 0.25F}},
          oracle::massfold<oracle::h2o>{.inner = {}, .recent = recent, .score = cumulative}, s);
    agree(any_massfold{kvmeld::snapkv{.window = 8, .sinks = 0}},
          oracle::massfold<oracle::snapkv>{.inner = {.window = 8, .pool_window = true},
                                           .sinks = 0,
                                           .recent = 8,
                                           .score = windowed},
          s);
  }
  agree<Eigen::half>(any_massfold{kvmeld::h2o{}},
                     oracle::massfold<oracle::h2o>{.inner = {}, .recent = 20, .score = cumulative},
                     {80, 16, 2, 40, 0}, 1e-2);
}

TEST_CASE("massfold keeps its scorer's slots, and their keys to the bit", "[massfold]") {
  const kvmeld::cache_options in_bytes{
      .capacity = 100, .keys = kvmeld::storage::q8_0, .values = kvmeld::storage::q8_0};
  kvmeld::cache kv({.kv_heads = 1, .key_dim = 32}, in_bytes);
  kv.append(kv.heads(0, 0), fixtures::normal(100 * 32), fixtures::normal(100 * 32), 100);
  const auto q = fixtures::normal(100 * 32);
  kvmeld::cache plain = kv;
  const auto compress = [&](kvmeld::cache& to, const kvmeld::any_policy_or_peer& policy) {
    auto state = kvmeld::make_head_state(policy, to.head(0));
    kvmeld::workspace work;
    kvmeld::observe(policy, to.head(0), state, kvmeld::prompt_queries(q.data(), 100, 1, 1, 32));
    kvmeld::compress(policy, to.head(0), state, work, {.slots = 30});
  };
  compress(kv, any_massfold{kvmeld::h2o{}});
  compress(plain, kvmeld::h2o{});
  REQUIRE(kv.head(0).length() == 30);
  const auto key_of = [](kvmeld::cache& of, index_t s) {
    std::vector<float> key(32);
    kvmeld::to_floats(of.head(0).key(s), 32, key.data());
    return key;
  };
  index_t heavier = 0;
  for (index_t s = 0; s < 30; ++s) {
    CHECK(kv.head(0).position(s) == plain.head(0).position(s));
    CHECK(key_of(kv, s) == key_of(plain, s));
    heavier += kv.head(0).log_mass(s) > 0 ? 1 : 0;
    CHECK((kv.head(0).position(s) >= 4 || kv.head(0).log_mass(s) == 0));
  }
  CHECK(heavier > 10);
}

TEST_CASE("massfold refuses scores that have no logarithm", "[massfold][errors]") {
  struct negative {
    static constexpr std::string_view name() { return "negative"; }
    float score(const kvmeld::head_ref&, const kvmeld::head_state&, index_t) const { return -1; }
  };
  auto kv = fixtures::random_cache(60, 4, 1);
  const kvmeld::massfold<negative> policy;
  auto state = fixtures::make_state(policy, kv);
  CHECK_THROWS_WITH(fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{20}),
                    Catch::Contains("negative+massfold: expected scores of at least 0, got -1"));
  CHECK(kv.head(0).length() == 60);
}

TEST_CASE("dropkv tells slots apart that have nearly all attention", "[dropkv]") {
  // Slot 20 has all attention but exp(-25), which slot 30 has: 1 - p and v - o are 0 in floats.
  auto kv = fixtures::random_cache(60, 1, 1);
  const auto head = kv.head(0);
  for (index_t s = 0; s < 60; ++s) {
    head.key(s)[0] = s == 20 ? 40.0F : s == 30 ? 15.0F : 0.0F;
    head.value(s)[0] = s == 30 ? 3.0F : 1.0F;
  }
  const kvmeld::dropkv policy{.window = 4, .kernel = 1};
  auto state = fixtures::make_state(policy, kv);
  fixtures::queries queries(60, 1, 1);
  std::ranges::fill(queries.data, 1.0F);
  kvmeld::observe(policy, kv.head(0), state[0], queries.view());
  // Without it the outputs of four queries are slot 30's value: 3, not 1.
  CHECK(state[0].column(0)[20] == Approx(4 * 4).epsilon(1e-4));
  CHECK(state[0].column(0)[30] == Approx(4 * 4 * std::exp(-50.0)).epsilon(1e-4));
  // All others have exp(-40) each: without it a query that sees n of them has their mean value,
  // 1 + 2 / n.
  kv.head(0).key(30)[0] = 0;
  kvmeld::observe(policy, kv.head(0), state[0], queries.view());
  double change = 0;
  for (const double others : {56, 57, 58, 59}) {
    change += 4 / others / others;
  }
  CHECK(state[0].column(0)[20] == Approx(change).epsilon(1e-4));
}

}  // namespace massfold_test
