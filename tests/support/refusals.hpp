// SPDX-License-Identifier: MIT
// Calls that must throw, and must have changed nothing when they do.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/fixtures.hpp"

namespace fixtures {

inline const float bad_floats[] = {std::nanf(""), INFINITY, -INFINITY};

/// Three ragged heads, a state, and one step's input.
template <class Policy>
struct decode {
  static constexpr index_t heads = 3, group = 2, dim = 4, capacity = 24;

  Policy policy;
  fixtures::cache<float> kv{
      {.heads = heads, .group = group, .dim = dim, .capacity = capacity, .check_finite = true}};
  fixtures::state state;
  std::vector<float> data = normal(20 * heads * group * dim);
  kvmeld::query_view<float> queries = kvmeld::prompt_queries(data.data(), 20, heads, group, dim);
  std::vector<float> q = normal(heads * group * dim), k = normal(heads * dim), v = k, out = q;

  explicit decode(Policy p) : policy(p), state(fixtures::make_state(p, kv)) {
    for (index_t h = 0; h < heads; ++h) {
      append(h, h == 1 ? 3 : 14 + 3 * h);
      observe(policy, kv.head(h), state[h], queries.of(h));
    }
  }
  void append(index_t h, index_t n) { kv.append(h, normal(n * dim), normal(n * dim)); }

  std::vector<float> everything() {
    std::vector<float> all = out;
    for (index_t h = 0; h < heads; ++h) {
      const auto bytes = bytes_of(kv.head(h));
      all.insert(all.end(), bytes.begin(), bytes.end());
      all.push_back(static_cast<float>(kv.head(h).next_position()));
      for (index_t c = 0; c < state[h].slot_stats(); ++c) {
        all.insert(all.end(), state[h].column(c).begin(), state[h].column(c).end());
      }
      all.insert(all.end(), state[h].memory().begin(), state[h].memory().end());
      all.push_back(static_cast<float>(state[h].observed()));
    }
    return all;
  }
  /// LAW: `call` throws `error` with `message` in it, and everything is as before.
  void refuses(const std::string& message, const std::function<void()>& call) {
    const auto before = everything();
    CHECK_THROWS_AS(call(), kvmeld::error);
    CHECK_THROWS_WITH(call(), Catch::Contains("kvmeld: ") && Catch::Contains(message));
    const bool unchanged = everything() == before;
    CHECK(unchanged);
  }
  void step_with(const kvmeld::budget& b) { step(policy, kv, state, {q, k, v}, b, out); }
  void compress_with(const kvmeld::budget& b) {
    for (index_t h = 0; h < heads; ++h) {
      compress(policy, kv.head(h), state[h], state.workspace(), b, queries.of(h));
    }
  }
  void refuses_budget(const std::string& message, const auto& b) {
    refuses(message, [&] { compress_with(b); });
    refuses(message, [&] { step_with(b); });
  }
};

/// The least that a policy can be.
struct first_ones {
  static constexpr std::string_view name() { return "first_ones"; }
  void plan(const kvmeld::kv_head auto& head, const kvmeld::head_state&, index_t target,
            kvmeld::slot_scratch&, kvmeld::merge_plan& out) const {
    out.reset(head.length());
    for (index_t s = 0; s < target; ++s) {
      out.keep(s, head.log_mass(s));
    }
  }
};

}  // namespace fixtures
