// SPDX-License-Identifier: MIT
// One head, its policy and its state: what tests send through several steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace fixtures {

struct one_head {
  static constexpr index_t dim = 8, group = 2;

  kvmeld::any_policy_or_peer policy;
  fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 200}};
  fixtures::state state = fixtures::make_state(policy, kv);
  std::vector<float> out = std::vector<float>(group * dim);

  fixtures::head_view<float> head() { return kv.head(0); }
  index_t length() { return head().length(); }
  std::set<index_t> positions() {
    std::set<index_t> all;
    for (index_t s = 0; s < length(); ++s) {
      all.insert(head().position(s));
    }
    return all;
  }
  /// All positions of `[from, to)`.
  bool holds(index_t from, index_t to) {
    const auto all = positions();
    for (index_t p = from; p < to; ++p) {
      if (!all.contains(p)) {
        return false;
      }
    }
    return true;
  }
};

/// One head, token by token, and its laws.
struct stream : one_head {
  explicit stream(const kvmeld::any_policy_or_peer& p) : one_head{p} {}

  std::vector<float> bytes() { return bytes_of(head()); }

  bool has_log_mass() {
    bool any = false;
    for (index_t s = 0; s < length(); ++s) {
      any = any || head().log_mass(s) != 0;
    }
    return any;
  }

  void append(index_t tokens) { kv.append(0, normal(tokens * dim), normal(tokens * dim)); }
  template <class T>
  void compress(const kvmeld::query_view<T>& queries, index_t target) {
    fixtures::compress(policy, kv, state, queries, kvmeld::budget{target});
  }
  void step(const kvmeld::budget& b) {
    fixtures::step(policy, kv, state, {normal(group * dim), normal(dim), normal(dim)}, b, out);
  }
  /// Another policy goes on where this one is: a fresh state, measured on what remains.
  void hand_over(const kvmeld::any_policy_or_peer& to, const kvmeld::query_view<float>& queries,
                 index_t target) {
    policy = to;
    state = fixtures::make_state(policy, kv);
    compress(queries, target);
  }

  /// LAWS of any head at any time: all finite, one position a slot, none unseen, the sinks there.
  void check(index_t seen, index_t sinks) {
    CHECK(head().next_position() == seen);
    const auto numbers = bytes();
    CHECK(std::ranges::all_of(numbers, [](float x) { return std::isfinite(x); }));
    CHECK(std::ranges::all_of(out, [](float x) { return std::isfinite(x); }));
    const auto positions = this->positions();
    CHECK(static_cast<index_t>(positions.size()) == length());
    CHECK(*positions.begin() >= 0);
    CHECK(*positions.rbegin() < seen);
    for (index_t position = 0; position < sinks; ++position) {
      CHECK(positions.contains(position));
    }
  }
};

}  // namespace fixtures
