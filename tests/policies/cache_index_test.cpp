// SPDX-License-Identifier: MIT
// streaming_llm by positions within the cache, on heads whose slots are in no order, or were
// another policy's before.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <set>
#include <vector>

#include "kvmeld/policies/streaming_llm.hpp"
#include "kvmeld/policies/tova.hpp"
#include "support/all_heads.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace cache_index_test {

using kvmeld::index_t;
using kvmeld::streaming_llm;

constexpr index_t dim = 8, tokens = 100, sinks = 4;

std::vector<float> normal(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  std::ranges::generate(x, [&] { return gauss(streams::floats); });
  return x;
}

/// Un-rotated keys are all alike, so that each says by how much it is rotated.
struct stream {
  kvmeld::rotary rope = kvmeld::rotary::halves(10'000.0);
  std::vector<float> alike = normal(dim);
  fixtures::cache<float> kv{{.heads = 1, .dim = dim, .capacity = tokens + 1, .rope = rope}};

  std::vector<float> key(index_t position) const {
    auto x = alike;
    rope.rotate(kvmeld::row<float>{x.data()}, dim, position);
    return x;
  }
  void prompt() {
    for (index_t t = 0; t < tokens; ++t) {
      kv.append(0, key(t), normal(dim));
    }
  }
  /// Keys are rotated by their positions, each of which is one slot's. Returned: how many of the
  /// lowest are consecutive, up to the first of the window.
  index_t check() {
    const auto head = kv.head(0);
    std::set<index_t> positions;
    float worst = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      positions.insert(head.position(s));
      const auto wanted = key(head.position(s));
      for (index_t i = 0; i < dim; ++i) {
        const float off = head.key(s)[i] - wanted[static_cast<std::size_t>(i)];
        worst = std::max(worst, std::abs(off));
      }
    }
    CHECK(worst < 1e-4F);
    CHECK(static_cast<index_t>(positions.size()) == head.length());
    index_t run = 1;
    for (index_t p = *positions.begin(); positions.contains(p + 1); ++p) {
      ++run;
    }
    return run;
  }
  /// Steps under `policy`, checked one by one.
  void steps(const streaming_llm& policy, fixtures::state& state, index_t target, index_t count) {
    std::vector<float> out(dim);
    for (index_t t = 0; t < count; ++t) {
      fixtures::step(policy, kv, state, {normal(dim), key(kv.head(0).next_position()), normal(dim)},
                     kvmeld::budget{target}, out);
      CHECK(check() > sinks);
    }
  }
};

TEST_CASE("streaming_llm by cache index takes over from another policy", "[streaming_llm]") {
  stream x;
  x.prompt();
  const kvmeld::tova first{.sinks = GENERATE(0, 4)};
  auto before = fixtures::make_state(first, x.kv);
  const auto q = normal(tokens * dim);
  fixtures::compress(first, x.kv, before, kvmeld::prompt_queries(q.data(), tokens, 1, 1, dim),
                     kvmeld::budget{32});
  const streaming_llm policy{.sinks = sinks,
                             .positions = streaming_llm::position_mode::cache_index};
  auto state = fixtures::make_state(policy, x.kv);
  fixtures::compress(policy, x.kv, state, kvmeld::no_queries, kvmeld::budget{16});
  CHECK(x.kv.head(0).length() == 16);
  CHECK(x.check() > sinks);
  x.steps(policy, state, 16, 40);
  CHECK(x.check() == 16);  // the gaps have left the window
}

TEST_CASE("streaming_llm by cache index goes by positions, wherever the slots lie",
          "[streaming_llm]") {
  stream x;
  x.prompt();
  const auto head = x.kv.head(0);
  std::vector<index_t> order(tokens);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, streams::floats);
  for (index_t s = 0; s < tokens; ++s) {
    const auto own = x.key(order[static_cast<std::size_t>(s)]);
    std::ranges::copy(own, head.key(s).data);
    head.position(s) = order[static_cast<std::size_t>(s)];
  }
  const streaming_llm policy{.sinks = sinks,
                             .positions = streaming_llm::position_mode::cache_index};
  auto state = fixtures::make_state(policy, x.kv);
  fixtures::compress(policy, x.kv, state, kvmeld::no_queries, kvmeld::budget{16});
  CHECK(x.check() == 16);
  x.steps(policy, state, 16, 40);
}

}  // namespace cache_index_test
