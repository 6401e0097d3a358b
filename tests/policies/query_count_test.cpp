// SPDX-License-Identifier: MIT
// Queries of a prompt are those of its tokens: where there are more, some have no position.
#include <catch2/catch.hpp>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

using fixtures::index_t;

namespace {

constexpr index_t tokens = 70, group = 2, dim = 8;
constexpr kvmeld::budget most{.slots = 32};

struct one {
  kvmeld::any_policy policy;
  fixtures::cache<float> kv = fixtures::random_cache(tokens, dim, group);
  kvmeld::state state = kvmeld::make_state(policy, kv);
};

template <class Call>
void refused(const fixtures::example& example, Call call) {
  one x{example.policy};
  const auto before = fixtures::bytes_of(x.kv.head(0));
  CHECK_THROWS_WITH(call(x),
                    Catch::Contains("queries of at most 70 tokens") && Catch::Contains("got 71"));
  CHECK(fixtures::bytes_of(x.kv.head(0)) == before);
  CHECK(x.state[0].observed() == 0);
  CHECK(x.state[0].length() == 0);
}

}  // namespace

TEST_CASE("more queries than tokens are refused by every policy", "[errors]") {
  const fixtures::queries padded(tokens + 1, group, dim);
  auto chunk = padded.view();
  chunk.data += chunk.row, chunk.count = tokens, chunk.before = 1;  // of a prompt in chunks
  for (const auto& example : fixtures::every_policy()) {
    CAPTURE(example.name);
    for (const auto& queries : {padded.view(), chunk}) {
      refused(example, [&](one& x) { kvmeld::observe(x.policy, x.kv, x.state, queries); });
      refused(example, [&](one& x) { kvmeld::compress(x.policy, x.kv, x.state, queries, most); });
      refused(example,
              [&](one& x) { kvmeld::observe(x.policy, x.kv.head(0), x.state[0], queries); });
      refused(example, [&](one& x) {
        kvmeld::compress(x.policy, x.kv.head(0), x.state[0], x.state.workspace(), most, queries);
      });
    }
  }
}

TEST_CASE("as many queries as tokens, or more with positions, are taken", "[errors]") {
  const fixtures::queries all(tokens, group, dim), padded(tokens + 1, group, dim);
  const std::vector<index_t> position(tokens + 1, tokens);  // to come
  auto placed = padded.view();
  placed.position = position.data();
  for (const auto& example : fixtures::every_policy()) {
    CAPTURE(example.name);
    for (const auto& queries : {all.view(), placed}) {
      one x{example.policy};
      CHECK_NOTHROW(kvmeld::compress(x.policy, x.kv, x.state, queries, most));
    }
  }
}

TEST_CASE("heads without tokens take no queries, and refuse none", "[errors]") {
  fixtures::cache<float> kv{{.heads = 2, .group = group, .dim = dim, .capacity = tokens}};
  kv.append(1, fixtures::normal(tokens * dim), fixtures::normal(tokens * dim));
  const kvmeld::h2o policy;
  auto state = kvmeld::make_state(policy, kv);
  const auto q = fixtures::normal(2 * tokens * group * dim);
  kvmeld::compress(policy, kv, state, kvmeld::prompt_queries(q.data(), tokens, 2, group, dim),
                   most);
  CHECK(kv.head(0).length() == 0);
  CHECK(kv.head(1).length() == most.slots);
}
