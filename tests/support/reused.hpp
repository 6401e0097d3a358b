// SPDX-License-Identifier: MIT
// Heads of one policy that are run alone, through a prompt and some steps: copied and cleared.
#pragma once

#include <catch2/catch.hpp>
#include <functional>
#include <string>

#include "support/policies.hpp"
#include "support/saved.hpp"

namespace fixtures {

using kvmeld::budget;
using kvmeld::errc;

/// A prompt's and some steps' numbers.
struct text {
  static constexpr index_t tokens = 60, steps = 25, dim = 8, group = 2;
  std::vector<float> k = normal((tokens + steps) * dim), v = normal((tokens + steps) * dim),
                     q = normal((tokens + steps) * group * dim);

  template <class T>
  std::span<const float> at(const T& x, index_t t, index_t width, index_t n = 1) const {
    return std::span(x).subspan(static_cast<std::size_t>(t * width),
                                static_cast<std::size_t>(n * width));
  }
};

/// Heads of one policy, each of them run alone.
struct heads {
  kvmeld::any_policy_or_peer policy;
  budget limit;
  cache<float> kv;
  fixtures::state state = fixtures::make_state(policy, kv);

  explicit heads(const kvmeld::any_policy_or_peer& p, index_t count = 1, index_t capacity = 100)
      : policy(p),
        limit{std::max(30, kvmeld::declared(p).min_budget())},
        kv({.heads = count, .group = text::group, .dim = text::dim, .capacity = capacity}) {}

  void prompt(index_t h, const text& x) {
    kv.append(h, x.at(x.k, 0, x.dim, x.tokens), x.at(x.v, 0, x.dim, x.tokens));
    const auto queries = kvmeld::prompt_queries(x.q.data(), x.tokens, 1, x.group, x.dim);
    observe(policy, kv.head(h), state[h], queries);
    compress(policy, kv.head(h), state[h], state.workspace(), limit, queries);
  }
  /// The outputs of steps `from` to `to` − 1.
  std::vector<float> decode(index_t h, const text& x, index_t from, index_t to) {
    std::vector<float> all, out(x.group * x.dim);
    for (index_t t = x.tokens + from;
         t < x.tokens + to && kvmeld::declared(policy).supports_decode(); ++t) {
      check_step(policy, kv.head(h), limit);
      step(policy, kv.head(h), state[h], state.workspace(), x.at(x.q, t, x.group * x.dim).data(),
           x.at(x.k, t, x.dim).data(), x.at(x.v, t, x.dim).data(), limit, out.data());
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
};

inline std::vector<example> policies() {
  auto all = every_policy();
  all.push_back(
      {"ems, a table of its own", kvmeld::ems{.window = 8, .threshold = -1, .table = 50}});
  return all;
}

inline void refuses(errc code, const std::string& message, const std::function<void()>& call) {
  INFO(message);
  CHECK_THROWS_WITH(call(), Catch::Contains(message));
  try {
    call();
  } catch (const kvmeld::error& e) {
    CHECK(e.code() == code);
  }
}

}  // namespace fixtures
