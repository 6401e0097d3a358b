// SPDX-License-Identifier: MIT
// Policies one after another: another one decodes, compression upon compression, budgets that
// change, prompts in chunks. Every policy of the list, through any_policy.
#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>

#include "support/one_head.hpp"

namespace composition_test {

using fixtures::every_policy;
using fixtures::index_t;
using fixtures::stream;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

constexpr index_t dim = fixtures::one_head::dim, group = fixtures::one_head::group;

/// The slots of a head, whatever their order: position, log-mass, key, value.
std::set<std::vector<float>> as_set(const fixtures::head_view<float>& head) {
  std::set<std::vector<float>> rows;
  for (index_t s = 0; s < head.length(); ++s) {
    std::vector<float> r{static_cast<float>(head.position(s)), head.log_mass(s)};
    for (index_t i = 0; i < dim; ++i) {
      r.insert(r.end(), {head.key(s)[i], head.value(s)[i]});
    }
    rows.insert(r);
  }
  return rows;
}

std::vector<float> columns_of(const kvmeld::head_state& state) {
  std::vector<float> all(state.memory().begin(), state.memory().end());
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    all.insert(all.end(), state.column(c).begin(), state.column(c).end());
  }
  return all;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<std::uint32_t, float>,
                            std::bit_cast<std::uint32_t, float>);
}

TEST_CASE("one policy compresses the prompt, another decodes", "[composition]") {
  constexpr index_t tokens = 90, target = 48, steps = 12;
  const fixtures::queries queries(tokens, group, dim);
  for (const auto& first : every_policy()) {
    stream prompt(first.policy);
    prompt.append(tokens);
    prompt.compress(queries.view(), target);
    for (const auto& second : every_policy()) {
      if (!kvmeld::declared(second.policy).supports_decode()) {
        continue;
      }
      INFO(first.name << ", then " << second.name);
      stream next = prompt;
      if (second.policy.name() == "ems" &&
          prompt.has_log_mass()) {  // which its table cannot take in
        const auto go_on = [&] {
          next.hand_over(second.policy, queries.view(), target);
          next.step({target});
        };
        CHECK_THROWS_AS(go_on(), kvmeld::error);
        continue;
      }
      next.hand_over(second.policy, queries.view(), target);
      if (kvmeld::declared(first.policy).evicts()) {
        REQUIRE(next.bytes() == prompt.bytes());  // what fits is handed over as it is
      } else {
        stream alone(second.policy);  // and a whole prompt is the second policy's own
        alone.kv = prompt.kv;
        alone.compress(queries.view(), target);
        REQUIRE(next.bytes() == alone.bytes());
        REQUIRE(same_bits(columns_of(next.state[0]), columns_of(alone.state[0])));
      }
      // The first token sees just what was handed over.
      stream whole = next;
      whole.hand_over(kvmeld::full_cache{}, queries.view(), target);
      auto& bits = fixtures::random_bits();
      const auto start = bits;
      next.step({target});
      bits = start;
      whole.step({target});
      for (std::size_t i = 0; i < next.out.size(); ++i) {
        // (ems, where it compressed itself, has a mass of its own.)
        CHECK((next.out[i] == Approx(whole.out[i]).margin(1e-5) ||
               !kvmeld::declared(first.policy).evicts()));
      }
      index_t length = next.length();
      for (index_t t = 1; t < steps; ++t) {
        next.step({target});
        const index_t expected =
            kvmeld::declared(second.policy).evicts() ? std::min(length + 1, target) : length + 1;
        REQUIRE((second.exact ? next.length() == expected : next.length() <= expected));
        length = next.length();
      }
      next.check(tokens + steps, std::min(first.sinks, second.sinks));
    }
  }
}

TEST_CASE("compressing again changes nothing, and compressing further keeps fewer slots",
          "[composition]") {
  constexpr index_t tokens = 90, target = 48, less = 32;
  const fixtures::queries queries(tokens, group, dim);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name);
    stream one(policy);
    one.append(tokens);
    one.compress(queries.view(), target);
    const auto bytes = one.bytes(), columns = columns_of(one.state[0]);
    one.compress(kvmeld::no_queries, target);
    CHECK(one.bytes() == bytes);
    CHECK(same_bits(columns_of(one.state[0]), columns));
    one.compress(queries.view(), target);  // measured again, which may change scores but no slot
    CHECK(one.bytes() == bytes);
    one.compress(queries.view(), less);
    one.check(tokens, sinks);
    if (kvmeld::declared(policy).evicts()) {
      CHECK(one.length() <= less);
      CHECK((one.length() == less || !exact));
    }
  }
}

TEST_CASE("evicting in stages is evicting at once", "[composition]") {
  constexpr index_t tokens = 120;
  const fixtures::queries queries(tokens, group, dim);
  for (const any_policy& policy :
       {any_policy(kvmeld::streaming_llm{}), any_policy(kvmeld::h2o{}),
        any_policy(kvmeld::snapkv{.window = 8}), any_policy(kvmeld::full_cache{})}) {
    INFO(policy.name());
    stream stages(policy);
    stages.append(tokens);
    stream once = stages;
    once.compress(queries.view(), 24);
    stages.compress(queries.view(), 100);
    for (const index_t target : {77, 40, 24}) {
      stages.compress(kvmeld::no_queries, target);
    }
    CHECK(as_set(stages.head()) == as_set(once.head()));
  }
}

TEST_CASE("budgets shrink and grow from step to step", "[composition]") {
  constexpr index_t tokens = 60, steps = 80;
  const fixtures::queries queries(tokens, group, dim);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    if (!kvmeld::declared(policy).supports_decode() || !kvmeld::declared(policy).evicts()) {
      continue;
    }
    INFO(name);
    stream one(policy);
    one.append(tokens);
    one.compress(queries.view(), 48);
    index_t length = one.length();
    for (index_t t = 0; t < steps; ++t) {
      const auto draw = [](index_t from, index_t to) {
        return std::uniform_int_distribution<index_t>(from, to)(fixtures::random_bits());
      };
      // Now a slot more or less, now any, now with a trigger.
      budget b{t % 3 == 0 ? draw(kvmeld::declared(policy).min_budget(), 60)
                          : std::max(kvmeld::declared(policy).min_budget(), length + t % 2)};
      b.trigger = t % 5 == 0 ? b.slots + draw(1, 9) : 0;
      INFO("step " << t << ": " << length << " slots, target " << b.slots << ", trigger "
                   << b.trigger);
      one.step(b);
      const index_t expected = length + 1 >= b.trigger_length() ? b.slots : length + 1;
      REQUIRE((exact ? one.length() == expected : one.length() <= expected));
      length = one.length();
      if (t % 10 == 9) {
        one.check(tokens + t + 1, sinks);
      }
    }
  }
}

TEST_CASE("prompts come in chunks, each compressed with what is left of those before",
          "[composition]") {
  constexpr index_t chunk = 40, target = 36;
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name);
    stream one(policy);
    for (index_t round = 1; round <= (kvmeld::declared(policy).evicts() ? 5 : 3); ++round) {
      one.append(chunk);
      const fixtures::queries queries(chunk, group, dim);
      one.compress(queries.view(), target);
      one.check(round * chunk, sinks);
      if (kvmeld::declared(policy).evicts()) {
        CHECK((exact ? one.length() == target : one.length() <= target));
      }
      for (index_t t = 0; t < 5 && round == 2 && kvmeld::declared(policy).supports_decode(); ++t) {
        stream decode = one;
        decode.step({target});  // a token between two chunks
        decode.check(round * chunk + 1, sinks);
      }
    }
  }
}

TEST_CASE("a policy that drops nothing counts every token, however they come", "[composition]") {
  struct counting {
    any_policy policy;
    index_t column;
  };
  for (const auto& [policy, column] :
       {counting{kvmeld::fold{}, kvmeld::fold::tokens},
        counting{kvmeld::zsmerge{.residual = 3}, kvmeld::zsmerge::count}}) {
    INFO(policy.name());
    stream one(policy);
    const auto counted = [&, tokens = column] {  // clang 14 captures no binding
      const auto each = one.state[0].column(tokens);
      return std::accumulate(each.begin(), each.end(), 0.0);
    };
    index_t seen = 0;
    for (index_t round = 0; round < 4; ++round) {
      one.append(50), seen += 50;
      const index_t target = 40 - 4 * round;
      one.compress(fixtures::queries(50, group, dim).view(), target);
      REQUIRE(counted() == seen);
      for (index_t t = 0; t < 20; ++t) {
        one.step({target + t % 7, t % 2 == 0 ? 0 : target + 9});
        REQUIRE(counted() == ++seen);
      }
    }
  }
}

TEST_CASE("every policy measures a prompt in chunks as at once", "[composition]") {
  constexpr index_t tokens = 96, chunk = 32;
  const fixtures::queries queries(tokens, group, dim);
  for (const any_policy& policy : {any_policy(kvmeld::h2o{}), any_policy(kvmeld::zsmerge{}),
                                   any_policy(kvmeld::snapkv{.window = 8})}) {
    INFO(policy.name());
    stream once(policy), chunks(policy);
    once.append(tokens);
    kvmeld::observe(policy, once.head(), once.state[0], queries.view());
    for (index_t begin = 0; begin < tokens; begin += chunk) {
      for (index_t s = begin; s < begin + chunk; ++s) {
        chunks.head().push(once.head().key(s).data, once.head().value(s).data);
      }
      auto own = queries.view();
      own.data += begin * own.row, own.count = chunk;
      kvmeld::observe(policy, chunks.head(), chunks.state[0], own);
    }
    for (index_t c = 0; c < once.state[0].slot_stats(); ++c) {
      for (std::size_t s = 0; s < tokens; ++s) {
        CHECK(chunks.state[0].column(c)[s] ==
              Approx(once.state[0].column(c)[s]).epsilon(1e-4).margin(1e-6));
      }
    }
    CHECK(chunks.state[0].observed() == once.state[0].observed());
  }
}

}  // namespace composition_test
