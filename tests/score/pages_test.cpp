// SPDX-License-Identifier: MIT
// Attention over rows in pages, which are read where they lie, has the bits of attention over rows
// side by side, and those that it has where nothing is compared.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/score/attention.hpp"
#include "support/fixtures.hpp"

namespace pages_test {

using kvmeld::as_size;
using kvmeld::index_t;

struct outputs {
  std::vector<float> out, probabilities;
  bool operator==(const outputs&) const = default;
};

outputs attend(const kvmeld::head_ref& head, const std::vector<float>& q) {
  outputs x{std::vector<float>(as_size(head.group(), head.value_dim())),
            std::vector<float>(as_size(head.group(), head.length()))};
  kvmeld::attend(head, q.data(), x.out.data(), x.probabilities);
  return x;
}

/// The last page of the table is not there, nor in use.
template <class Scalar>
void check(index_t slots, kvmeld::layout how, index_t dim, index_t value_dim, index_t group) {
  constexpr index_t heads = 3, length = 301;
  const index_t pages = (length + slots - 1) / slots;
  const kvmeld::attention_spec spec{
      .kv_heads = heads, .group = group, .key_dim = dim, .value_dim = value_dim};
  const auto pool = [&](index_t of) {
    return std::vector<Scalar>(as_size(slots * pages) *
                               as_size(heads, kvmeld::row_size<Scalar>(of)));
  };
  auto k = pool(dim), v = pool(value_dim);
  std::vector<index_t> table(as_size(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(7));
  table.push_back(-1);
  const index_t capacity = slots * (pages + 1);
  kvmeld::paged_cache paged(spec, {.capacity = capacity}, kvmeld::rows(k, how),
                            kvmeld::rows(v, how), {.pages = table, .slots = slots});
  kvmeld::cache own(spec, {.capacity = capacity,
                           .keys = kvmeld::storage_of<Scalar>,
                           .values = kvmeld::storage_of<Scalar>});
  CHECK(paged.head(0).even_keys() == (slots >= 8));
  CHECK(paged.head(0).even_values() == (slots >= 8));
  const auto keys = fixtures::normal(heads * length * dim),
             values = fixtures::normal(heads * length * value_dim);
  paged.append(paged.heads(0, 0), keys, values, length);
  own.append(own.heads(0, 0), keys, values, length);
  const auto q = fixtures::normal(group * dim);
  for (index_t h = 0; h < heads; ++h) {
    CHECK(attend(paged.head(h), q) == attend(own.head(h), q));
  }
}

TEMPLATE_TEST_CASE("rows in pages are attended to as rows side by side", "[pages]", float,
                   Eigen::half, Eigen::bfloat16, kvmeld::q8_0) {
  using enum kvmeld::layout;
  const auto how = GENERATE(pages_nhd, pages_hnd);
  // Too small to be read where they lie, no whole tile, and several.
  const index_t slots = GENERATE(1, 7, 8, 13, 16, 24, 64, 301);
  CAPTURE(slots);
  for (const auto& [dim, value_dim] : {std::pair{32, 32}, {100, 64}, {192, 128}}) {
    for (const index_t group : {1, 17}) {
      CAPTURE(dim, group);
      check<TestType>(slots, how, dim, value_dim, group);
    }
  }
}

}  // namespace pages_test
