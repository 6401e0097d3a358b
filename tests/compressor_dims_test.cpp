// SPDX-License-Identifier: MIT
// A compressor's calls over several heads whose values have another dim than keys: each head gets
// and gives the rows that are its own.
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/fixtures.hpp"

namespace compressor_dims_test {

using fixtures::normal;
using kvmeld::index_t;

constexpr index_t kv_heads = 2, requests = 2, heads = kv_heads * requests, group = 3;

struct dims {
  index_t keys, values;

  kvmeld::attention_spec spec(index_t n) const {
    return {.kv_heads = n, .group = group, .key_dim = keys, .value_dim = values};
  }
};

/// Numbers `[of]` of row `i`.
template <class T>
std::vector<float> row(const std::vector<T>& x, index_t i, index_t of) {
  const auto first = x.begin() + std::ptrdiff_t{i} * of;
  return {first, first + of};
}

TEMPLATE_TEST_CASE("heads of a step have rows of their own, whatever the dims", "[value_dim]",
                   float, Eigen::half) {
  const dims d = GENERATE(dims{12, 20}, dims{20, 12});
  const kvmeld::budget limit{10};
  kvmeld::cache all(d.spec(kv_heads), {.requests = requests, .capacity = 16});
  kvmeld::compressor meld(all, kvmeld::h2o{}, limit);
  kvmeld::cache alone(d.spec(1), {.requests = heads, .capacity = 16});
  kvmeld::compressor one(alone, kvmeld::h2o{}, limit);
  const std::vector<index_t> both{0, 1};
  std::vector<float> out(static_cast<std::size_t>(heads * group * d.values)),
      expected(static_cast<std::size_t>(group * d.values));
  for (int t = 0; t < 20; ++t) {
    const auto q = normal<TestType>(heads * group * d.keys), k = normal<TestType>(heads * d.keys),
               v = normal<TestType>(heads * d.values);
    meld.step(all.heads(0, both), {q, k, v}, out);
    for (index_t h = 0; h < heads; ++h) {
      one.step(alone.heads(0, h),
               {row(q, h, group * d.keys), row(k, h, d.keys), row(v, h, d.values)}, expected);
      REQUIRE(row(out, h, group * d.values) == expected);
    }
  }
  for (index_t h = 0; h < heads; ++h) {
    CHECK(fixtures::bytes_of(all.head(h)) == fixtures::bytes_of(alone.head(h)));
  }
}

TEST_CASE("drafts have rows of their own, whatever the dims", "[value_dim]") {
  const dims d = GENERATE(dims{12, 20}, dims{20, 12});
  const kvmeld::budget limit{20};
  kvmeld::cache drafted(d.spec(kv_heads), {.capacity = 32}), stepped = drafted;
  kvmeld::compressor draft(drafted, kvmeld::h2o{}, limit), step(stepped, kvmeld::h2o{}, limit);
  const index_t tokens = 3, rows = kv_heads * group * d.values;
  const auto k = normal(9 * kv_heads * d.keys), v = normal(9 * kv_heads * d.values);
  drafted.append(drafted.heads(0, 0), k, v, 9), stepped.append(stepped.heads(0, 0), k, v, 9);
  const auto q = normal(tokens * kv_heads * group * d.keys),
             new_k = normal(tokens * kv_heads * d.keys),
             new_v = normal(tokens * kv_heads * d.values);
  std::vector<float> out(static_cast<std::size_t>(tokens * rows)),
      expected(static_cast<std::size_t>(rows));
  draft.draft(drafted.heads(0, 0), {q, new_k, new_v}, out, tokens);
  draft.accept(0, tokens);
  for (index_t t = 0; t < tokens; ++t) {
    step.step(stepped.heads(0, 0),
              {row(q, t, kv_heads * group * d.keys), row(new_k, t, kv_heads * d.keys),
               row(new_v, t, kv_heads * d.values)},
              expected);
    REQUIRE(row(out, t, rows) == expected);
  }
  for (index_t h = 0; h < kv_heads; ++h) {
    CHECK(fixtures::bytes_of(drafted.head(h)) == fixtures::bytes_of(stepped.head(h)));
  }
}

}  // namespace compressor_dims_test
