// SPDX-License-Identifier: MIT
// Published traps: what implementations of these papers have got wrong. Each test fails when its
// guard is taken away; where it can, it takes the guard away itself and sees the trap close.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <numeric>

#include "support/one_head.hpp"

namespace traps_test {

using fixtures::every_policy;
using fixtures::index_t;
using fixtures::normal;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

constexpr index_t dim = fixtures::one_head::dim, group = fixtures::one_head::group;

/// One head, its policy, and queries that all point along the first axis, so that a key's first
/// element says how much attention it gets.
struct stream : fixtures::one_head {
  static std::vector<float> key(float wanted) {
    auto k = normal(dim);
    k[0] = wanted;
    return k;
  }
  static std::vector<float> queries(index_t count) {
    auto q = normal(count * group * dim, 0.1F);
    for (std::size_t i = 0; i < q.size(); i += dim) {
      q[i] = 3;
    }
    return q;
  }
  /// A prompt of tokens alike, `wanted` as much each.
  static stream with_prompt(const any_policy& policy, index_t tokens, float wanted) {
    stream s{{policy}};
    for (index_t t = 0; t < tokens; ++t) {
      s.append(wanted);
    }
    return s;
  }
  void append(float wanted) { kv.append(0, key(wanted), normal(dim)); }
  void compress(index_t target) {
    const auto q = queries(head().length());
    fixtures::compress(policy, kv, state,
                       kvmeld::prompt_queries(q.data(), head().length(), 1, group, dim),
                       budget{target});
  }
  void step(float wanted, index_t target) {
    fixtures::step(policy, kv, state, {queries(1), key(wanted), normal(dim)}, budget{target}, out);
  }
};

/// Policies that protect the latest tokens while decoding: how many, at a target of 32.
struct windowed {
  any_policy policy;
  index_t recent;
};
std::vector<windowed> windowed_policies() {
  using namespace kvmeld;
  return {{h2o{}, 16},
          {snapkv{.window = 8}, 8},
          {zsmerge{.proximity = 0.2F, .residual = 3}, 6},
          {zsmerge{.proximity = 0.2F, .new_token_competes = false}, 6},
          {fold{}, 8},
          {d2o{}, 7},
          {keepkv{}, 16},
          {roco{}, 10},
          {scissorhands{}, 10},
          {cam{}, 28},
          {random_tokens{.window = 8}, 8},
          {r_kv{}, 8},
          {key_diff{.window = 8}, 8},
          {centroids{.window = 8}, 8},
          {streaming_llm{}, 28}};
}

/// The same head with its slots in another order: slot `s` is what slot `order[s]` was.
fixtures::cache<float> reordered(fixtures::cache<float>& kv, const std::vector<index_t>& order) {
  fixtures::cache<float> other = kv;
  const auto from = kv.head(0), to = other.head(0);
  for (index_t s = 0; s < from.length(); ++s) {
    const index_t o = order[static_cast<std::size_t>(s)];
    for (index_t i = 0; i < from.dim(); ++i) {
      to.key(s)[i] = from.key(o)[i], to.value(s)[i] = from.value(o)[i];
    }
    to.log_mass(s) = from.log_mass(o), to.position(s) = from.position(o);
  }
  return other;
}
std::vector<index_t> shuffled(index_t n) {
  std::vector<index_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, fixtures::random_bits());
  return order;
}

void refuses(const std::string& message, const std::function<void()>& call) {
  CHECK_THROWS_AS(call(), kvmeld::error);
  CHECK_THROWS_WITH(call(), Catch::Contains("kvmeld: ") && Catch::Contains(message));
}

/// A prompt whose queries do not attend to the sinks, then steps that do not either.
stream with_unwanted_sinks(const any_policy& policy) {
  stream s{{policy}};
  for (index_t t = 0; t < 80; ++t) {
    s.append(t < 4 ? -4.0F : 1.0F);
  }
  s.compress(32);
  for (index_t t = 0; t < 40 && kvmeld::declared(policy).supports_decode(); ++t) {
    s.step(1, 32);
  }
  return s;
}

TEST_CASE("trap: sinks that get no attention are evicted", "[traps]") {
  for (const auto& example : every_policy()) {
    INFO(example.name);
    CHECK(with_unwanted_sinks(example.policy).holds(0, example.sinks));
  }
  // As the papers have them, without sinks, the trap closes. (Not on H2O: all queries of a prompt
  // add to the first token's score, and the first of them has nothing else to look at.)
  for (const any_policy& policy :
       {any_policy(kvmeld::snapkv{.window = 8, .sinks = 0}), any_policy(kvmeld::roco{.sinks = 0}),
        any_policy(kvmeld::streaming_llm{.sinks = 0})}) {
    INFO(policy.name());
    CHECK_FALSE(with_unwanted_sinks(policy).holds(0, 1));
  }
}

TEST_CASE("trap: new tokens start at a score of 0 and are always evicted", "[traps]") {
  // The old have collected attention for a whole prompt; the new tokens get next to none at first.
  for (const auto& [policy, recent] : windowed_policies()) {
    INFO(policy.name());
    stream s = stream::with_prompt(policy, 80, 1);
    s.compress(32);
    for (index_t t = 80; t < 130; ++t) {
      s.step(-4, 32);
      REQUIRE(s.holds(t + 1 - recent, t + 1));
    }
  }
  // Without a window H2O lets every one of them go, and keeps the prompt for ever.
  stream frozen = stream::with_prompt(kvmeld::h2o{.recent = 0}, 80, 1);
  frozen.compress(32);
  for (index_t t = 0; t < 50; ++t) {
    frozen.step(-4, 32);
  }
  CHECK(*frozen.positions().rbegin() < 80);
}

TEST_CASE("trap: a new token's own attention is not counted", "[traps]") {
  // One new token is attended to far more than anything else: it outlives the window.
  for (const any_policy& policy :
       {any_policy(kvmeld::h2o{}), any_policy(kvmeld::snapkv{.window = 8}),
        any_policy(kvmeld::zsmerge{.proximity = 0.2F}), any_policy(kvmeld::roco{}),
        any_policy(kvmeld::tova{})}) {
    INFO(policy.name());
    stream s{{policy}};
    for (index_t t = 0; t < 80; ++t) {
      s.append(0);
    }
    s.compress(32);
    s.step(3, 32);
    for (index_t t = 0; t < 60; ++t) {
      s.step(0, 32);
    }
    CHECK(s.holds(80, 81));
  }
}

TEST_CASE("trap: ties evict protected tokens", "[traps]") {
  // Protection that is a large score loses to scores as large, in the slots that lose ties: the
  // slots are in reverse, so that these hold the sinks.
  for (const float score : {0.0F, 1.0F, 3.4e38F, INFINITY, -INFINITY, std::nanf("")}) {
    for (const bool reversed : {false, true}) {
      for (const auto& [policy, recent] : windowed_policies()) {
        INFO(policy.name() << ", all scores " << score << (reversed ? ", reversed" : ""));
        stream s{{policy}};
        for (index_t t = 0; t < 80; ++t) {
          s.append(0);
        }
        if (reversed) {
          std::vector<index_t> order(80);
          std::iota(order.rbegin(), order.rend(), 0);
          s.kv = reordered(s.kv, order);
        }
        const auto q = normal(80 * group * dim, 0);  // which attend to all slots alike
        const auto queries = kvmeld::prompt_queries(q.data(), 80, 1, group, dim);
        kvmeld::observe(policy, s.head(), s.state[0], queries);
        const std::string_view name = policy.name();
        if (name == "h2o" || name == "snapkv" || name == "zsmerge" || name == "cam") {
          std::ranges::fill(s.state[0].column(0), score);
        }
        kvmeld::compress(policy, s.head(), s.state[0], s.state.workspace(), {32}, queries);
        CHECK(s.head().length() == 32);
        CHECK(s.holds(0, 4));
        CHECK(s.holds(80 - recent, 80));
      }
    }
  }
}

TEST_CASE("trap: a window larger than the budget", "[traps]") {
  // Refused, rather than a budget exceeded, a window cut or a negative count of others.
  using namespace kvmeld;
  for (const any_policy& policy : {any_policy(streaming_llm{.sinks = 20}),
                                   any_policy(h2o{.sinks = 21}),
                                   any_policy(h2o{.recent = 0.99F}),
                                   any_policy(snapkv{.window = 16}),
                                   any_policy(snapkv{.window = kvmeld::search::max_tokens}),
                                   any_policy(zsmerge{.residual = 20}),
                                   any_policy(zsmerge{.proximity = 0.95F}),
                                   any_policy(fold{.sinks = 20}),
                                   any_policy(roco{.window = 20}),
                                   any_policy(scissorhands{.window = 20}),
                                   any_policy(d2o{.sinks = 20}),
                                   any_policy(keepkv{.sinks = 20}),
                                   any_policy(random_tokens{.window = 20}),
                                   any_policy(r_kv{.window = 20}),
                                   any_policy(key_diff{.window = 20}),
                                   any_policy(centroids{.window = 20}),
                                   any_policy(compactor{.window = 20}),
                                   any_policy(attention_matching{.recent = 20}),
                                   any_policy(kvzip{.sinks = 20}),
                                   any_policy(kvmerger{.sinks = 20}),
                                   any_policy(cam{.sinks = 20}),
                                   any_policy(dropkv{.window = 20}),
                                   any_policy(any_massfold{h2o{.sinks = 20}}),
                                   any_policy(tova{.sinks = 20}),
                                   any_policy(expected_attention{.sinks = 20}),
                                   any_policy(triattention{.sinks = 20}),
                                   any_policy(ems{.window = 20})}) {
    INFO(policy.name());
    stream s{{policy}};
    for (index_t t = 0; t < 60; ++t) {
      s.append(0);
    }
    const auto before = fixtures::bytes_of(s.head());
    const std::string message = std::string(policy.name()) + ": expected a budget of at least ";
    refuses(message, [&] { s.compress(20); });
    refuses(message, [&] { s.step(0, 20); });
    refuses(message, [&] {
      kvmeld::compress(policy, s.head(), s.state[0], s.state.workspace(), {20},
                       fixtures::queries(60, group, dim).view());
    });
    CHECK(fixtures::bytes_of(s.head()) == before);
    CHECK(s.state[0].observed() == 0);
  }
}

TEST_CASE("trap: the latest slots are taken for the latest tokens", "[traps]") {
  // A removal puts the newest token into the freed slot: soon no slot is where its token was. Not
  // all policies depart, so the prompt is shuffled.
  for (const auto& [policy, recent] : windowed_policies()) {
    INFO(policy.name());
    stream s = stream::with_prompt(policy, 40, 0);
    s.kv = reordered(s.kv, shuffled(40));
    s.compress(32);
    const auto head = s.head();
    index_t out_of_order = 0;
    for (index_t t = 40; t < 140; ++t) {
      s.step(0.5F * static_cast<float>(t % 3), 32);
      REQUIRE(s.holds(t + 1 - recent, t + 1));
      for (index_t r = 1; r < head.length(); ++r) {
        out_of_order += head.position(r) < head.position(r - 1) ? 1 : 0;
      }
    }
    CHECK(out_of_order > 0);
  }
}

TEST_CASE("trap: the order of slots decides", "[traps]") {
  // The same tokens in other slots: the same slots stay, merge and attend, up to rounding.
  for (const auto& example : every_policy()) {
    INFO(example.name);
    const index_t tokens = 70, target = 40;
    stream a{{example.policy}};
    a.kv.append(0, normal(tokens * dim), normal(tokens * dim));
    stream b = a;
    b.kv = reordered(a.kv, shuffled(tokens));
    const fixtures::queries queries(tokens, group, dim);
    fixtures::compress(a.policy, a.kv, a.state, queries.view(), budget{target});
    fixtures::compress(b.policy, b.kv, b.state, queries.view(), budget{target});
    REQUIRE(oracle::set_difference(fixtures::to_oracle(a.head()), fixtures::to_oracle(b.head())) <
            1e-4);
    for (index_t t = 0; t < 20 && kvmeld::declared(example.policy).supports_decode(); ++t) {
      const auto q = normal(group * dim), k = normal(dim), v = normal(dim);
      fixtures::step(a.policy, a.kv, a.state, {q, k, v}, budget{target}, a.out);
      fixtures::step(b.policy, b.kv, b.state, {q, k, v}, budget{target}, b.out);
      REQUIRE(oracle::difference(fixtures::to_mat(a.out.data(), group, dim),
                                 fixtures::to_mat(b.out.data(), group, dim)) < 1e-4);
    }
  }
}

}  // namespace traps_test
