// SPDX-License-Identifier: MIT
// Calls for some heads of a cache: a layer's, or those of the requests that are active.
#include <catch2/catch.hpp>

#include "support/policies.hpp"
#include "support/refusals.hpp"
#include "support/saved.hpp"

namespace {

using fixtures::every_policy;
using fixtures::normal;
using kvmeld::budget;
using kvmeld::head_range;
using kvmeld::head_selection;
using kvmeld::index_t;
using list = std::vector<index_t>;

constexpr index_t heads = 6, group = 2, dim = 8, tokens = 50, target = 30;

/// Of all heads' rows `[heads, width]` those of the heads chosen, in their order.
std::vector<float> rows(const std::vector<float>& all, const head_selection& chosen,
                        index_t width) {
  std::vector<float> some;
  for (index_t i = 0; i < chosen.count(); ++i) {
    const auto first = all.begin() + chosen[i] * width;
    some.insert(some.end(), first, first + width);
  }
  return some;
}

/// One cache, called for all heads at once or for some after the other.
struct run {
  kvmeld::any_policy policy;
  fixtures::cache<float> kv{{.heads = heads, .group = group, .dim = dim, .capacity = 64}};
  kvmeld::state state = kvmeld::make_state(policy, kv);
  budget limit{std::max(target, policy.min_budget())};
  std::vector<float> out = std::vector<float>(heads * group * dim);

  void step(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
            const head_selection& chosen) {
    const auto sq = rows(q, chosen, group * dim), sk = rows(k, chosen, dim),
               sv = rows(v, chosen, dim);
    std::vector<float> some(sq.size());
    kvmeld::step(policy, kv, state, chosen, {sq, sk, sv}, limit, some);
    for (index_t i = 0; i < chosen.count(); ++i) {
      std::copy_n(some.begin() + i * group * dim, group * dim,
                  out.begin() + chosen[i] * group * dim);
    }
  }
};

}  // namespace

TEST_CASE("a cache run by layers or by requests is the one that is run at once", "[heads]") {
  const list odd = {5, 1, 3}, none, last = {0};
  const head_selection parts[] = {odd, none, head_range{2, 1}, head_range{6, 0}, head_range{4, 1},
                                  last};
  for (const auto& example : every_policy()) {
    INFO(example.name);
    run whole{example.policy}, parted{example.policy};
    for (index_t h = 0; h < heads; ++h) {
      const auto k = normal((tokens - h) * dim), v = normal((tokens - h) * dim);
      whole.kv.append(h, k, v), parted.kv.append(h, k, v);
    }
    const auto q = normal(heads * tokens * group * dim);  // [heads, tokens, group, dim]
    const kvmeld::query_view<float> queries{q.data(), tokens, tokens * group * dim, dim,
                                            group * dim};
    compress(whole.policy, whole.kv, whole.state, queries, whole.limit);
    for (const bool first : {true, false}) {
      const list others = {4, 0, 2};
      const head_selection chosen = first ? odd : others;
      const auto own = rows(q, chosen, tokens * group * dim);
      auto some = queries;
      some.data = own.data();
      compress(parted.policy, parted.kv, parted.state, chosen, some, parted.limit);
    }
    CHECK(fixtures::everything(parted.kv, parted.state) ==
          fixtures::everything(whole.kv, whole.state));
    for (int t = 0; t < 12 && example.policy.decodes(); ++t) {
      const auto fq = normal(heads * group * dim), k = normal(heads * dim), v = normal(heads * dim);
      kvmeld::step(whole.policy, whole.kv, whole.state, {fq, k, v}, whole.limit, whole.out);
      for (const head_selection& part : parts) {
        parted.step(fq, k, v, part);
      }
      REQUIRE(parted.out == whole.out);
    }
    CHECK(fixtures::everything(parted.kv, parted.state) ==
          fixtures::everything(whole.kv, whole.state));
  }
}

TEST_CASE("heads are shown queries together as each of them alone", "[heads][observe]") {
  const auto q = normal(2 * tokens * group * dim);
  const kvmeld::query_view<float> queries{q.data(), tokens, tokens * group * dim, dim, group * dim};
  for (const auto& example : every_policy()) {
    INFO(example.name);
    run alone{example.policy}, together{example.policy}, all{example.policy};
    for (index_t h = 0; h < heads - 1; ++h) {  // and one is empty
      const auto k = normal(tokens * dim), v = normal(tokens * dim);
      alone.kv.append(h, k, v), together.kv.append(h, k, v), all.kv.append(h, k, v);
    }
    observe(alone.policy, alone.kv.head(4), alone.state[4], queries.of(0));
    observe(alone.policy, alone.kv.head(1), alone.state[1], queries.of(1));
    observe(together.policy, together.kv, together.state, list{4, 1}, queries);
    CHECK(fixtures::everything(together.kv, together.state) ==
          fixtures::everything(alone.kv, alone.state));
    auto same = queries;
    same.head = 0;
    observe(all.policy, all.kv, all.state, same);
    observe(together.policy, together.kv, together.state, head_range{0, 0}, same);
    together.state = make_state(together.policy, together.kv);
    observe(together.policy, together.kv, together.state, head_range{0, heads}, same);
    CHECK(fixtures::everything(together.kv, together.state) ==
          fixtures::everything(all.kv, all.state));
  }
}

TEST_CASE("heads that are not there or come twice are refused by every call", "[heads][errors]") {
  fixtures::decode d(kvmeld::any_policy(kvmeld::h2o{}));  // 3 heads
  const auto refused = [&](const std::string& message, const head_selection& chosen) {
    const auto n = static_cast<std::size_t>(std::clamp(chosen.count(), 0, 3));
    const auto first = [n](auto& x, std::size_t width) { return std::span(x).first(n * width); };
    d.refuses("step: " + message, [&] {
      step(d.policy, d.kv, d.state, chosen, {first(d.q, 8), first(d.k, 4), first(d.v, 4)},
           budget{12}, first(d.out, 8));
    });
    d.refuses("compress: " + message,
              [&] { compress(d.policy, d.kv, d.state, chosen, d.queries, budget{12}); });
    d.refuses("observe: " + message, [&] { observe(d.policy, d.kv, d.state, chosen, d.queries); });
  };
  for (const head_range r : {head_range{0, 4}, {3, 1}, {4, 0}, {-1, 1}, {1, -1}, {2, 2147483647}}) {
    refused("expected a range of heads within 0 to 2, got " + std::to_string(r.count) +
                " heads from " + std::to_string(r.first),
            r);
  }
  refused("expected heads 0 to 2, got 3", list{0, 3});
  refused("expected heads 0 to 2, got -1", list{-1});
  refused("expected each head once, got head 1 twice", list{1, 2, 1});
  refused("expected a list of heads, got null",
          std::span<const index_t>(static_cast<const index_t*>(nullptr), 2));
  CHECK_NOTHROW(compress(d.policy, d.kv, d.state, list{1, 2}, d.queries, budget{12}));
}

TEST_CASE("rows of other heads than those chosen are refused", "[heads][errors]") {
  fixtures::decode d(kvmeld::any_policy(kvmeld::h2o{}));
  const list two = {2, 0};
  const auto q = normal(16), k = normal(8), all = normal(24);
  std::vector<float> out(16);
  const auto refused = [&](const std::string& message, const kvmeld::step_input& in,
                           std::span<float> to) {
    d.refuses(message, [&] { step(d.policy, d.kv, d.state, two, in, budget{12}, to); });
  };
  refused("step: expected q [2, 2, 4] (16 numbers), got 24", {all, k, k}, out);
  refused("step: expected q [2, 2, 4] (16 numbers), got 8", {k, k, k}, out);
  refused("step: expected k [2, 4] (8 numbers), got 16", {q, q, k}, out);
  refused("step: expected v [2, 4] (8 numbers), got 16", {q, k, q}, out);
  refused("step: expected out [2, 2, 4] (16 numbers), got 15", {q, k, k}, std::span(out).first(15));
  const std::span<const float> null(static_cast<const float*>(nullptr), 8);
  refused("step: expected k [2, 4] (8 numbers), got null", {q, null, k}, out);
  d.append(2, 4);  // head 2 is full; the other would have room
  d.refuses("got all 24 slots in use", [&] {
    step(d.policy, d.kv, d.state, two, {q, k, k}, budget{12}, out);
  });
  CHECK_NOTHROW(step(d.policy, d.kv, d.state, head_range{0, 2}, {q, k, k}, budget{12}, out));
  kvmeld::query_view<float> queries = d.queries;
  queries.count = -1;
  d.refuses("expected at least 0 queries, got -1",
            [&] { observe(d.policy, d.kv, d.state, two, queries); });
  queries.count = 20, queries.data = nullptr;
  d.refuses("observe: expected finite queries, got null",
            [&] { observe(d.policy, d.kv, d.state, two, queries); });
}
