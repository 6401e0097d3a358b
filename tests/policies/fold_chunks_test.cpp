// SPDX-License-Identifier: MIT
// fold by scores, of a prompt that comes in chunks.
#include <catch2/catch.hpp>
#include <utility>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"

namespace fold_chunks_test {

using fixtures::index_t;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::fold;

TEST_CASE("a prompt's chunks are scored by one pass where all its queries are there", "[fold]") {
  constexpr index_t group = 2, dim = 8, tokens = 150;
  const any_policy any = fold{}.sharing(40);
  const auto k = fixtures::normal(tokens * dim), v = fixtures::normal(tokens * dim),
             q = fixtures::normal(tokens * group * dim);
  const auto all = kvmeld::prompt_queries(q.data(), tokens, 1, group, dim);
  const index_t half = tokens / 2;
  const auto column_of = [](const fixtures::state& state) {
    const auto column = state[0].column(fold::prompt_score);
    return std::vector(column.begin(), column.end());
  };
  // [tokens] after a first chunk of `first` tokens, and behind a second one whose queries begin
  // `before` tokens earlier
  const auto scores = [&](index_t first, index_t before) {
    fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = tokens}};
    auto state = fixtures::make_state(any, kv);
    const auto from = [&](const std::vector<float>& rows, index_t begin, index_t end) {
      return std::vector(rows.begin() + begin * dim, rows.begin() + end * dim);
    };
    kv.append(0, from(k, 0, first), from(v, 0, first));
    fixtures::observe(any, kv, state, kvmeld::prompt_queries(q.data(), first, 1, group, dim));
    const auto held = column_of(state);
    if (first < tokens) {
      kv.append(0, from(k, first, tokens), from(v, first, tokens));
      auto chunk = all.last(tokens - first);
      chunk.before = before;
      fixtures::observe(any, kv, state, chunk);
    }
    return std::pair{held, column_of(state)};
  };
  const auto once = scores(tokens, 0).second;
  CHECK(scores(half, half).second == once);
  for (const index_t before : {0, 20}) {  // with fewer, no slot's score falls
    const auto [held, now] = scores(half, before);
    CHECK(now != once);
    for (std::size_t s = 0; s < held.size(); ++s) {
      CHECK(now[s] >= held[s]);
    }
  }
}

}  // namespace fold_chunks_test
