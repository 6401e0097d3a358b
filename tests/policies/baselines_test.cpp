// SPDX-License-Identifier: MIT
// Baselines against their oracles: a prompt, then decode steps, slots compared as sets.
#include <catch2/catch.hpp>
#include <limits>

#include "kvmeld/peers.hpp"
#include "support/agree.hpp"

namespace policies_baselines_test {

using fixtures::agree;
using fixtures::index_t;
using fixtures::setting;
using kvmeld::budget;

const setting settings[] = {{100, 8, 1, 40, 60}, {120, 33, 2, 41, 60},    {257, 16, 4, 64, 30},
                            {30, 4, 3, 48, 80},  {1, 5, 1, 24, 60},       {60, 1, 1, 30, 20},
                            {45, 7, 2, 40, 20},  {100, 8, 2, 40, 60, 50}, {1, 8, 2, 24, 90, 31}};

/// Both sides with half and bfloat16 storage.
void agree_in_16_bits(const kvmeld::any_policy_or_peer& policy,
                      const fixtures::any_oracle& oracle_policy, index_t steps = 20) {
  const setting s{80, 16, 2, 40, steps};
  agree<Eigen::half>(policy, oracle_policy, s, 1e-2);
  agree<Eigen::bfloat16>(policy, oracle_policy, s, 5e-2);
}

TEST_CASE("random_tokens is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::random_tokens{.window = 8}, oracle::random_tokens{.window = 8}, s);
    agree(kvmeld::random_tokens{.sinks = 0, .window = 3, .seed = 0x1EDCBA98765432U},
          oracle::random_tokens{.sinks = 0, .window = 3, .seed = 0x1EDCBA98765432U}, s);
  }
  agree_in_16_bits(kvmeld::random_tokens{}, oracle::random_tokens{});
}

TEST_CASE("random_tokens that pins prompts is its oracle", "[oracle]") {
  for (const auto& s : settings) {  // prompts below the budget, above it, of one token
    agree(kvmeld::random_tokens{.window = 8, .prompt = true},
          oracle::random_tokens{.window = 8, .pin_prompt = true}, s);
  }
}

TEST_CASE("random_tokens is a uniform sample, another for another seed", "[random]") {
  const auto kept = [](std::uint64_t seed) {
    const kvmeld::random_tokens policy{.sinks = 0, .window = 0, .seed = seed};
    auto kv = fixtures::random_cache(4000, 1, 1);
    auto state = fixtures::make_state(policy, kv);
    fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{400});
    std::vector<index_t> positions;
    for (index_t s = 0; s < 400; ++s) {
      positions.push_back(kv.head(0).position(s));
    }
    return positions;
  };
  const auto a = kept(1), b = kept(2);
  CHECK(a == kept(1));
  index_t common = 0, early = 0;
  for (const index_t p : a) {
    common += std::ranges::count(b, p) > 0 ? 1 : 0;
    early += p < 1000 ? 1 : 0;
  }
  CHECK(common < 80);  // 40 by chance
  CHECK(early > 60);   // 100 by chance
  CHECK(early < 140);
}

TEST_CASE("key_diff is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    if (s.dim == 1) {
      continue;  // cosines of 1 or -1: rounding decides
    }
    agree(kvmeld::key_diff{}, oracle::key_diff{}, s);
    agree(kvmeld::key_diff{.sinks = 0, .window = 6}, oracle::key_diff{.sinks = 0, .window = 6}, s);
  }
  agree_in_16_bits(kvmeld::key_diff{}, oracle::key_diff{});
}

TEST_CASE("the nearest slot is never a broken one while there is another", "[key_diff]") {
  auto kv = fixtures::random_cache(9, 8, 1);
  const auto head = kv.head(0);
  for (const index_t broken : {0, 4, 8}) {
    head.key(broken)[5] = std::numeric_limits<float>::quiet_NaN();
  }
  index_t nearest = -1;
  for (const index_t s : {1, 2, 5, 6, 7}) {
    const auto distance = [&](index_t r) {
      return kvmeld::score::squared_distance(head.key(r), head.key(3), 8);
    };
    nearest = nearest < 0 || distance(s) < distance(nearest) ? s : nearest;
  }
  CHECK(kvmeld::search::nearest_by_distance(head, 3, [](index_t) { return true; }) == nearest);
  CHECK(kvmeld::search::nearest_by_distance(head, 3, [](index_t s) { return s == 4; }) == 4);
  CHECK(kvmeld::search::nearest_by_distance(head, 3, [](index_t) { return false; }) == -1);
}

TEST_CASE("a broken key spoils no other's score: key_diff keeps what it would without it",
          "[key_diff]") {
  const float broken =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  constexpr index_t tokens = 90, odd = 70, kept = 40;
  auto with = fixtures::random_cache(tokens, 8, 1);
  fixtures::cache<float> without({.heads = 1, .group = 1, .dim = 8, .capacity = tokens});
  const auto head = with.head(0);
  for (index_t s = 0; s < tokens; ++s) {
    if (s != odd) {
      without.head(0).push(head.key(s).data, head.value(s).data);
    }
  }
  head.key(odd)[3] = broken;
  const kvmeld::key_diff policy;
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan all, sound;
  const auto plan = [&](const auto& of, kvmeld::merge_plan& out) {
    auto state = kvmeld::make_head_state(policy, of);
    state.extend(of.length());
    kvmeld::plan(policy, of, state, kvmeld::no_queries, kept, scratch, out);
  };
  plan(head, all), plan(without.head(0), sound);
  REQUIRE(all.rows() == sound.rows());
  for (index_t r = 0; r < all.rows(); ++r) {
    CHECK(all.anchor(r) == sound.anchor(r) + (sound.anchor(r) >= odd ? 1 : 0));
  }
}

TEST_CASE("key_diff drops what is like the rest, and zero keys are like nothing", "[key_diff]") {
  fixtures::cache<float> kv{{.heads = 1, .group = 1, .dim = 2, .capacity = 8}};
  const std::vector<float> keys = {1, 0, 3, 1, 0, 0, 0, -2, 9, -1, -1, 3};
  kv.append(0, keys, keys);
  const kvmeld::key_diff policy{.sinks = 0};
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{3});
  for (index_t s = 0; s < 3; ++s) {
    // The last two fill what is free of the first three slots.
    CHECK(kv.head(0).position(s) == (std::array{3, 5, 2})[static_cast<std::size_t>(s)]);
  }
}

TEST_CASE("tova is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::tova{}, oracle::tova{}, s);
    agree(kvmeld::tova{.sinks = 0}, oracle::tova{.sinks = 0}, s);
  }
  agree_in_16_bits(kvmeld::tova{}, oracle::tova{});
}

TEST_CASE("roco is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::roco{}, oracle::roco{}, s);
    agree(kvmeld::roco{.sinks = 0, .window = 3, .steady = 0.5F},
          oracle::roco{.sinks = 0, .window = 3, .steady = 0.5}, s);
    agree(kvmeld::roco{.window = 5, .steady = 1}, oracle::roco{.window = 5, .steady = 1}, s);
  }
  agree_in_16_bits(kvmeld::roco{}, oracle::roco{});
}

TEST_CASE("scissorhands is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::scissorhands{}, oracle::scissorhands{}, s);
    agree(kvmeld::scissorhands{.sinks = 0, .window = 4, .history = 7},
          oracle::scissorhands{.sinks = 0, .window = 4, .history = 7}, s);
  }
  agree_in_16_bits(kvmeld::scissorhands{}, oracle::scissorhands{});
}

TEST_CASE("r_kv is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    if (s.dim == 1) {
      continue;  // cosines of 1 or -1: rounding decides
    }
    agree(kvmeld::r_kv{}, oracle::r_kv{}, s);
    agree(kvmeld::r_kv{.sinks = 0, .window = 3, .kernel = 1, .lambda = 0.6F},
          oracle::r_kv{.sinks = 0, .window = 3, .kernel = 1, .lambda = 0.6}, s);
  }
  agree_in_16_bits(kvmeld::r_kv{}, oracle::r_kv{});
}

TEST_CASE("expected_attention is its oracle", "[oracle]") {
  const kvmeld::expected_attention policy{.window = 2, .future = 20};
  for (fixtures::setting s : settings) {
    for (const bool interleaved : {false, true}) {
      oracle::expected_attention o{.window = 2, .future = 20};
      s.rope = interleaved ? kvmeld::rotary::interleaved(10'000) : kvmeld::rotary::halves(10'000);
      o.rotation.interleaved = interleaved;
      agree(policy, o, s);
    }
  }
  agree_in_16_bits(kvmeld::expected_attention{.window = 1},
                   oracle::expected_attention{.window = 1});
}

TEST_CASE("triattention is its oracle, measured or calibrated", "[oracle]") {
  for (fixtures::setting s : settings) {
    for (const bool interleaved : {false, true}) {
      oracle::triattention o{.window = 2};
      s.rope = interleaved ? kvmeld::rotary::interleaved(10'000) : kvmeld::rotary::halves(10'000);
      o.rotation.interleaved = interleaved;
      agree(kvmeld::triattention{.window = 2}, o, s);
      const index_t size = s.dim + s.dim / 2;
      const auto numbers = fixtures::normal(s.group * size);
      o.sinks = 0;
      for (index_t g = 0; g < s.group; ++g) {
        const auto mean = numbers.begin() + std::ptrdiff_t{g} * size, end = mean + s.dim;
        o.calibrated.push_back({{mean, end}, {end, mean + size}});
      }
      agree(kvmeld::triattention{.sinks = 0, .window = 2, .calibration = numbers}, o, s);
    }
  }
  agree_in_16_bits(kvmeld::triattention{}, oracle::triattention{});
}

TEST_CASE("a calibration of another shape is refused", "[triattention][errors]") {
  auto kv = fixtures::random_cache(60, 6, 2);
  const std::vector<float> numbers(2 * 6);
  const kvmeld::triattention policy{.calibration = numbers};
  auto state = fixtures::make_state(policy, kv);
  CHECK_THROWS_WITH(fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{20}),
                    Catch::Contains("triattention: expected a calibration [2, 9], got 12 floats"));
  CHECK(kv.head(0).length() == 60);
}

TEST_CASE("expected_attention counts log-mass", "[oracle]") {
  auto kv = fixtures::random_cache(60, 6, 2);
  for (const index_t s : {10, 20, 30}) {
    kv.head(0).log_mass(s) = static_cast<float>(s) / 10;
  }
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  const kvmeld::expected_attention policy;
  auto state = fixtures::make_state(policy, kv);
  const fixtures::queries queries(60, 2, 6);
  fixtures::compress(policy, kv, state, queries.view(), budget{20});
  oracle::expected_attention{}.prompt(expected, queries.tensor(), {}, 20);
  CHECK(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-5);
}

TEST_CASE("centroids is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::centroids{.window = 8}, oracle::centroids{.window = 8}, s);
    agree(kvmeld::centroids{.sinks = 0, .window = 2, .rounds = 3},
          oracle::centroids{.sinks = 0, .window = 2, .rounds = 3}, s);
  }
  // A mean rounded to 16 bits may be nearest to another new token: the prompt alone.
  agree_in_16_bits(kvmeld::centroids{.window = 6}, oracle::centroids{.window = 6}, 0);
}

TEST_CASE("centroids clusters a prompt's next chunk anew, with the tokens that slots stand for",
          "[oracle]") {
  const kvmeld::centroids policy{.window = 8};
  fixtures::cache<float> kv{{.heads = 1, .group = 1, .dim = 8, .capacity = 200}};
  auto state = fixtures::make_state(policy, kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  for (int round = 0; round < 3; ++round) {
    const auto k = fixtures::normal(50 * 8), v = fixtures::normal(50 * 8);
    kv.append(0, k, v);
    for (index_t t = 0; t < 50; ++t) {
      append(expected, fixtures::to_mat(&k[static_cast<std::size_t>(t * 8)], 1, 8)[0],
             fixtures::to_mat(&v[static_cast<std::size_t>(t * 8)], 1, 8)[0]);
    }
    fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{30});
    oracle::centroids{.window = 8}.prompt(expected, {}, {}, 30);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-4);
  }
  double tokens = 0;
  for (index_t s = 0; s < 30; ++s) {
    tokens += std::exp(static_cast<double>(kv.head(0).log_mass(s)));
  }
  CHECK(tokens == Approx(150));
}

TEST_CASE("compactor is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    for (const float blend : {-1.0F, 0.0F, 0.5F}) {
      agree(kvmeld::compactor{.chunk = 30, .blend = blend},
            oracle::compactor{.chunk = 30, .blend = static_cast<double>(blend)}, s);
    }
    agree(kvmeld::compactor{.sinks = 0, .window = 1}, oracle::compactor{.sinks = 0, .window = 1},
          s);
  }
  agree_in_16_bits(kvmeld::compactor{}, oracle::compactor{});
}

TEST_CASE("dropkv is its oracle", "[oracle]") {
  for (const setting& s :
       {setting{100, 8, 1, 40, 0}, {100, 33, 2, 41, 0}, {257, 16, 4, 64, 0}, {60, 1, 1, 30, 0}}) {
    agree(kvmeld::dropkv{.window = 8}, oracle::dropkv{.window = 8}, s);
    agree(kvmeld::dropkv{.window = 3, .sinks = 0, .kernel = 1},
          oracle::dropkv{.window = 3, .sinks = 0, .kernel = 1}, s);
  }
  agree_in_16_bits(kvmeld::dropkv{.window = 8}, oracle::dropkv{.window = 8}, 0);
}

TEST_CASE("cam is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::cam{}, oracle::cam{}, s, 1e-4);
    agree(kvmeld::cam{.sinks = 0, .merge = 3, .seed = 5},
          oracle::cam{.sinks = 0, .merge = 3, .seed = 5}, s, 1e-4);
  }
  agree_in_16_bits(kvmeld::cam{}, oracle::cam{});
}

}  // namespace policies_baselines_test
