// SPDX-License-Identifier: MIT
// EMS against the oracle that expands every token; memory counted; nothing lost where nothing need
// be.
#include "kvmeld/policies/ems.hpp"

#include <catch2/catch.hpp>

#include "support/allocations.hpp"
#include "support/ems_pair.hpp"

namespace policies_ems_test {

using fixtures::alike_tokens;
using fixtures::both;
using fixtures::decoded;
using fixtures::ems_pair;
using fixtures::index_t;
using fixtures::same_table;
using kvmeld::budget;
using kvmeld::ems;
using kvmeld::detail::ems_table;

struct example {
  ems policy;
  kvmeld::rotary rope = fixtures::default_rope;
};
const example table[] = {
    {{.window = 8, .threshold = 0.1F}},
    {{.window = 8, .kernel = 1, .sinks = 0, .gamma = 1.5F, .threshold = 0.3F}},
    {{.window = 5, .gamma = 2.25F, .threshold = 0, .combine = kvmeld::group_combine::max}},
    {{.window = 8, .gamma = 1, .threshold = 0.2F, .combine = kvmeld::group_combine::mean}},
    {{.window = 8, .gamma = 8, .threshold = 0.05F, .with_position = false}},
    {{.window = 3, .threshold = 0.1F, .with_position = false}, kvmeld::rotary::interleaved(500)},
    {{.window = 8,
      .gamma = 8,
      .threshold = 0.05F,
      .with_position = false,
      .merge_unrotated = true}},
    {{.window = 5, .with_position = false, .merge_unrotated = true},
     kvmeld::rotary::interleaved(500)}};

TEST_CASE("ems is the oracle that expands every token", "[oracle]") {
  const fixtures::setting settings[] = {
      {100, 8, 1, 40, 220}, {100, 33, 2, 41, 60},    {257, 16, 4, 64, 40},
      {30, 5, 3, 48, 100},  {1, 3, 4, 24, 250},      {60, 1, 2, 30, 60},
      {50, 2, 1, 20, 220},  {100, 8, 2, 40, 60, 50}, {1, 7, 2, 24, 210, 31}};
  for (const auto& [p, rope] : table) {
    INFO("gamma " << p.gamma << ", threshold " << p.threshold << ", window " << p.window);
    const auto [policy, o] = both(p, rope);
    for (fixtures::setting s : settings) {
      s.rope = rope;
      fixtures::agree(policy, o, s, 1e-5, same_table());
    }
  }
  const auto [policy, o] = both(table[0].policy);
  fixtures::agree<Eigen::half>(policy, o, {100, 4, 2, 40, 20, 0, 2e-3}, 1e-2, same_table(1e-2));
  fixtures::agree<Eigen::bfloat16>(policy, o, {100, 4, 2, 40, 20, 0, 1e-2}, 5e-2, same_table(5e-2));
}

TEST_CASE("ems is its oracle where most tokens share entries, in several prompts", "[oracle]") {
  for (const auto& [p, rope] : table) {
    ems policy = p;
    policy.threshold = 0.6F;
    INFO("gamma " << p.gamma << ", window " << p.window);
    for (const auto& [dim, group, trigger] : {std::tuple{6, 1, 0}, {9, 2, 0}, {16, 4, 36}}) {
      INFO("dim " << dim << ", group " << group);
      const alike_tokens data{7, dim, rope};
      ems_pair both_ways(policy, dim, group, 30, rope);
      both_ways.prompt(data, 120);
      const index_t after_prompt = both_ways.sharing();
      both_ways.steps(data, 120, trigger);
      CHECK(both_ways.sharing() >= after_prompt);
      both_ways.prompt(data, 60);  // on shared entries, with a table that is full
      both_ways.steps(data, 40, trigger);
      if (policy.gamma > 1) {
        CHECK(both_ways.sharing() > (policy.gamma < 2 ? 10 : 30));
      }
    }
  }
}

TEST_CASE("attention over shared entries is that over all their tokens", "[oracle]") {
  const index_t dim = 9, group = 2;
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::merged_terms));
  INFO(terms.name);
  const bool unrotated = GENERATE(false, true);
  const alike_tokens data{5, dim};
  ems_pair both_ways({.window = 6, .with_position = !unrotated, .merge_unrotated = unrotated}, dim,
                     group, 20, fixtures::default_rope, terms);
  both_ways.prompt(data, 100);
  both_ways.steps(data, 60);
  REQUIRE(both_ways.sharing() == 60);
  const auto head = both_ways.kv.head(0);
  const auto n = static_cast<std::size_t>(head.length());
  for (const float scale : {0.0F, 1.0F, 10.0F, 300.0F}) {
    const auto q = fixtures::normal(group * dim, scale);
    std::vector<float> out(q.size()), p(2 * n), lse(2);
    kvmeld::attend(head, both_ways.policy.mass(head, both_ways.state[0]), q.data(), out.data(), p,
                   lse);
    const auto expected = oracle::attend(both_ways.slow.expanded(both_ways.expected),
                                         fixtures::to_mat(q.data(), group, dim));
    // Logits in the hundreds are known to a unit in their last place.
    const double tolerance = scale > 100 ? 1e-3 : 1e-5;
    CHECK(oracle::difference(fixtures::to_mat(out.data(), group, dim), expected.output) <
          tolerance);
    CHECK(oracle::difference({lse.begin(), lse.end()}, expected.lse) < 1e-5);
    for (std::size_t g = 0; g < 2; ++g) {
      std::size_t token = 0;
      for (std::size_t s = 0; s < n; ++s) {
        double sum = 0;
        for (std::size_t i = 0; i < both_ways.expected.slots[s].members.size(); ++i) {
          sum += expected.probabilities[g][token++];
        }
        std::size_t own = 0;  // the library's slots are in another order
        while (head.position(static_cast<index_t>(own)) != both_ways.expected.slots[s].position) {
          ++own;
        }
        CHECK(oracle::difference(static_cast<double>(p[g * n + own]), sum) < tolerance);
      }
    }
  }
}

TEST_CASE("ems loses nothing of tokens that are equal but for their lengths", "[ems]") {
  // Six kinds, keys and values at right angles: every kind shares an entry, whatever the scores.
  const index_t dim = 8, group = 2;
  const ems policy{.window = 4, .sinks = 1, .gamma = 12};
  fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 17}};
  fixtures::cache<float> whole{{.heads = 1, .group = group, .dim = dim, .capacity = 200}};
  auto state = fixtures::make_state(policy, kv);
  auto whole_state = fixtures::make_state(kvmeld::full_cache{}, whole);
  std::vector<float> out(16), full(16);
  for (index_t t = 0; t < 150; ++t) {
    std::vector<float> k(8), v(8);
    k[static_cast<std::size_t>(t % 6)] = 0.5F + std::abs(fixtures::normal(1)[0]);
    v[static_cast<std::size_t>(t % 6)] = 3;
    const auto q = fixtures::normal(group * dim);
    fixtures::step(policy, kv, state, {q, k, v}, budget{16}, out);
    fixtures::step(kvmeld::full_cache{}, whole, whole_state, {q, k, v}, budget{200}, full);
    for (std::size_t i = 0; i < 16; ++i) {
      CHECK(out[i] == Approx(full[i]).margin(1e-5));
    }
  }
  CHECK(kv.head(0).length() == 16);
  CHECK(ems_table(state[0], group).sharing() == 134);
}

TEST_CASE("ems decodes in constant memory, and its table has an end", "[stream]") {
  const auto [gamma, places, trigger] = GENERATE(Catch::Generators::table<float, index_t, index_t>(
      {{4, 0, 0}, {2.5F, 0, 0}, {4, 20, 0}, {3, 0, 56}}));
  const auto [with_position, merge_unrotated] = GENERATE(
      Catch::Generators::table<bool, bool>({{true, false}, {false, false}, {false, true}}));
  const index_t dim = 16, group = 2, target = 48;
  const ems policy{.window = 8,
                   .gamma = gamma,
                   .with_position = with_position,
                   .merge_unrotated = merge_unrotated,
                   .table = places};
  const alike_tokens data{6, dim};
  std::vector<std::vector<float>> q, k, v;  // drawn before: the loop itself must not allocate
  for (index_t t = 0; t < 64; ++t) {
    q.push_back(fixtures::normal(group * dim));
    auto [key, value] = data.token({}, t);
    k.push_back(key), v.push_back(value);
  }
  fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 57}};
  auto state = fixtures::make_state(policy, kv);
  const ems_table tokens(state[0], group);
  const auto most = std::min(static_cast<index_t>((gamma - 1) * target + 0.5F), tokens.places());
  std::vector<float> out(static_cast<std::size_t>(group * dim));
  std::size_t bytes = 0, allocations = 0;
  bool within = true, finite = true;
  index_t largest = 0;
  for (std::size_t t = 0; t < 5000; ++t) {
    if (t == 60) {  // warm: every path has been taken
      allocations = fixtures::allocations;
    }
    fixtures::step(policy, kv, state, {q[t % 61], k[t % 63], v[t % 64]}, budget{target, trigger},
                   out);
    finite = finite && std::isfinite(out[0]);
    largest = std::max(largest, tokens.sharing());
    within = within && tokens.sharing() <= most;
    if (kv.head(0).length() == target) {
      bytes = bytes == 0 ? state[0].bytes() : bytes;
      within = within && state[0].bytes() == bytes;
    }
  }
  const std::size_t made = fixtures::allocations - allocations;
  CHECK(made == 0);
  CHECK(within);
  CHECK(finite);
  CHECK(largest == most);  // it was full
  const index_t floats = 5 * target + 4 + 2 * group + 6 * tokens.places();
  CHECK(bytes == sizeof(float) * static_cast<std::size_t>(floats));
}

TEST_CASE("ems on duplicates, zero keys, and what fits", "[hard]") {
  const ems policy{.window = 3, .sinks = 1, .gamma = 3};
  SECTION("duplicates but for their lengths, along axes so that likeness is exact") {
    ems_pair both_ways(policy, 4, 2, 12);
    both_ways.steps(120, [](index_t position) -> decoded {
      const auto t = static_cast<std::size_t>(position);
      std::vector<float> k(4), v(4);
      k[t % 3] = t % 3 == 2 ? 0.0F : 0.5F + std::abs(fixtures::normal(1)[0]);
      v[(t + t / 40) % 2] = 3;
      return {fixtures::normal(8), k, v};
    });
    CHECK(both_ways.sharing() == 24);
  }
  SECTION("ties: the higher slot joins the lower one, and the later token is dropped") {
    const ems one{.window = 1, .sinks = 0, .table = 1};
    fixtures::cache<float> kv{{.heads = 1, .dim = 2, .capacity = 6}};
    kv.append(0, std::vector<float>(12, 1.0F), std::vector<float>(12, 2.0F));
    auto state = fixtures::make_state(one, kv);
    const auto head = kv.head(0);
    const ems_table tokens(state[0], 1);
    kvmeld::slot_scratch scratch;
    kvmeld::merge_plan plan;
    for (const index_t position : {4, 5}) {  // the newest stays; of the others all score 1
      state[0].extend(6);
      for (index_t s = 0; s < 6; ++s) {
        tokens.each(s, [&](index_t t) { tokens.at(tokens.past, t) = 1; });
      }
      kvmeld::plan(one, head, state[0], 5, scratch, plan);
      REQUIRE(plan.row(0).size() == 2);
      CHECK(plan.row(0)[1].source == 4);
      kvmeld::apply(one, plan, head, state[0], scratch);
      REQUIRE(tokens.sharing() == 1);
      CHECK(tokens.position(head, tokens.after(0)) == 4);
      head.push(head.key(0).data, head.value(0).data);
      CHECK(head.position(4) == position + 1);
    }
  }
  SECTION("zero keys are alike to none") {
    ems_pair both_ways(policy, 3, 1, 12);
    both_ways.steps(40, [](index_t) -> decoded {
      return {fixtures::normal(3), {0, 0, 0}, fixtures::normal(3)};
    });
    CHECK(both_ways.sharing() == 0);
  }
  SECTION("an entry whose centre is a zero key: its tokens all have the logit 0") {
    const ems any{.window = 2, .sinks = 1, .threshold = 0};
    int shared = 0;
    for (int trial = 0; trial < 20; ++trial) {
      ems_pair both_ways(any, 3, 2, 6);
      for (index_t t = 0; t < 15; ++t) {
        both_ways.steps(1, [](index_t position) -> decoded {
          return {fixtures::normal(6), fixtures::normal(3, position == 2 ? 0.0F : 1.0F),
                  fixtures::normal(3)};
        });
        for (const auto& s : both_ways.expected.slots) {
          shared += oracle::ems::norm(s.key) == 0 && s.members.size() > 1 ? 1 : 0;
        }
      }
    }
    CHECK(shared > 20);
  }
  SECTION("a prompt that fits keeps every byte") {
    const index_t tokens = GENERATE(1, 2, 12);
    auto kv = fixtures::random_cache(tokens, 5, 2, 20);
    auto state = fixtures::make_state(policy, kv);
    const auto before = fixtures::bytes_of(kv.head(0));
    fixtures::compress(policy, kv, state, fixtures::queries(tokens, 2, 5).view(), budget{12});
    CHECK(fixtures::bytes_of(kv.head(0)) == before);
    CHECK(ems_table(state[0], 2).sharing() == 0);
  }
}

TEST_CASE("ems refuses what it cannot do", "[errors]") {
  const std::pair<ems, const char*> bad[] = {
      {{.window = 0}, "window in [1, 16777216], got 0"},
      {{.kernel = 4}, "expected an odd kernel, got 4"},
      {{.sinks = -1}, "sinks in [0, 16777216], got -1"},
      {{.gamma = 0.5F}, "expected gamma in [1, 1024], got 0.5"},
      {{.threshold = 2}, "expected threshold in [-1, 1], got 2"},
      {{.merge_unrotated = true}, "with_position=0 with merge_unrotated=1, got 1"},
      {{.table = -1}, "table in [0, 16777216], got -1"}};
  for (const auto& [policy, message] : bad) {
    CHECK_THROWS_WITH(validate(policy), Catch::Contains(message));
  }
  CHECK_THROWS_WITH(ems{.gamma = 1000}.memory(8, 1, 1 << 16),
                    Catch::Contains("expected a table of fewer than"));
  ems_pair both_ways({.window = 3}, 4, 1, 12);
  const alike_tokens data{2, 4};
  both_ways.prompt(data, 60);
  REQUIRE(both_ways.sharing() > 0);
  const auto head = both_ways.kv.head(0);
  const std::vector<float> p(12, 1.0F / 12);
  CHECK_THROWS_WITH(kvmeld::observe(both_ways.policy, head, both_ways.state[0],
                                    both_ways.state.workspace(), {.probabilities = p}),
                    Catch::Contains("ems: expected the step's query"));
  head.log_mass(3) = 1;
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan;
  CHECK_THROWS_WITH(both_ways.policy.plan(head, both_ways.state[0], 10, scratch, plan),
                    Catch::Contains("ems: expected no log-mass, got 1"));
}

}  // namespace policies_ems_test
