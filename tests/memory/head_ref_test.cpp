// SPDX-License-Identifier: MIT
// A head of any scalar and layout: the same rows, log-mass and positions as the head that it stands
// for.
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/tile_products.hpp"
#include "support/fixtures.hpp"

namespace head_ref_test {

using kvmeld::index_t;

std::vector<float> floats(const auto& row, index_t dim) {
  std::vector<float> x(static_cast<std::size_t>(dim));
  kvmeld::to_floats(row, dim, x.data());
  return x;
}

void stands_for(const auto& head) {
  const kvmeld::head_ref ref = head;
  const index_t dim = head.dim();
  REQUIRE(ref.length() == head.length());
  REQUIRE(ref.next_position() == head.next_position());
  REQUIRE(ref.capacity() == head.capacity());
  REQUIRE(ref.group() == head.group());
  REQUIRE(ref.scale() == head.scale());
  for (index_t s = 0; s < head.length(); ++s) {
    REQUIRE(&ref.log_mass(s) == &head.log_mass(s));
    REQUIRE(&ref.position(s) == &head.position(s));
    REQUIRE(floats(ref.key(s), dim) == floats(head.key(s), dim));
    REQUIRE(floats(ref.value(s), dim) == floats(head.value(s), dim));
    REQUIRE(ref.key(s)[dim - 1] == static_cast<float>(head.key(s)[dim - 1]));
    REQUIRE(floats(ref.value(s).from(2), dim - 2) == floats(head.value(s).from(2), dim - 2));
    REQUIRE(kvmeld::score::dot(ref.key(s), ref.value(s), dim) ==
            kvmeld::score::dot(head.key(s), head.value(s), dim));
  }
  const index_t last = head.length() - 1;
  kvmeld::detail::copy_row(ref.key(0), ref.key(last), dim);
  REQUIRE(floats(head.key(0), dim) == floats(head.key(last), dim));
  std::vector<float> x(static_cast<std::size_t>(dim), 0.1F);
  kvmeld::detail::store_row(x.data(), ref.value(last), dim);
  for (float& y : x) {
    y = static_cast<float>(static_cast<std::remove_reference_t<decltype(head.value(0)[0])>>(y));
  }
  REQUIRE(floats(head.value(last), dim) == x);
}

TEMPLATE_TEST_CASE("a head_ref has the rows of its head", "[head_ref]", float, Eigen::half,
                   Eigen::bfloat16) {
  const index_t heads = 2, dim = 6, capacity = 12, tokens = 9;
  const auto keys = fixtures::normal(tokens * dim), values = fixtures::normal(tokens * dim);
  const fixtures::cache_shape shape{.heads = heads, .group = 2, .dim = dim, .capacity = capacity};
  SECTION("contiguous") {
    fixtures::cache<TestType> kv(shape);
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    stands_for(kv.head(1));
  }
  SECTION("values transposed") {
    std::vector<TestType> k(static_cast<std::size_t>(heads * capacity * dim)), v(k.size());
    fixtures::strided_view<TestType> kv(shape, {k.data(), capacity * dim, dim, 1},
                                        {v.data(), capacity * dim, 1, capacity});
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    stands_for(kv.head(1));
  }
  SECTION("in pages") {
    const index_t slots = 4, pages = 8;
    std::vector<TestType> k(static_cast<std::size_t>(pages * slots * heads * dim)), v(k.size());
    std::vector<index_t> table{5, 0, 3};
    using layout = fixtures::layout<TestType>;
    fixtures::paged_view<TestType> kv(
        shape, layout::page_slot_head_dim(k.data(), slots, heads, dim),
        layout::page_head_slot_dim(v.data(), slots, heads, dim), {table.data(), slots, 0});
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    stands_for(kv.head(1));
  }
}

TEST_CASE("heads know what the model computes, wherever their cache is moved to", "[views]") {
  const auto rope = kvmeld::rotary::interleaved(500).dims(2);
  const fixtures::cache_shape shape{.heads = 2, .group = 3, .dim = 4, .capacity = 8, .rope = rope};
  std::vector<float> keys(2 * 8 * 4), values(keys.size());
  index_t pages[2] = {0, 1};
  const auto strided = [](auto& rows) {
    return fixtures::layout<float>::token_head_dim(rows.data(), 2, 4);
  };
  const auto paged = [](auto& rows) {
    return fixtures::layout<float>::page_slot_head_dim(rows.data(), 4, 2, 4);
  };
  const auto check = [&](auto kv) {
    const auto head = kv.head(1);
    const auto moved = std::move(kv);
    const kvmeld::attention_spec& spec = head.spec();
    CHECK((spec.kv_heads == 2 && spec.group == 3 && spec.key_dim == 4));
    CHECK((spec.scale == 0.5F && spec.value_dim == 4 && spec.rope == rope));
    CHECK((head.group() == 3 && head.dim() == 4 && head.scale() == 0.5F));
  };
  check(fixtures::cache<float>(shape));
  check(fixtures::strided_view<float>(shape, strided(keys), strided(values)));
  check(fixtures::paged_view<float>(shape, paged(keys), paged(values), {pages, 4}));
  kvmeld::cache still({.kv_heads = 1, .key_dim = 4}, {.capacity = 1});
  CHECK_FALSE(still.head(0).spec().rope.rotates());
}

TEST_CASE("the scale is 1/sqrt(dim) unless it is given, and groups divide", "[views]") {
  kvmeld::cache plain({.kv_heads = 1, .key_dim = 64}, {.capacity = 1}),
      scaled({.kv_heads = 1, .key_dim = 64, .scale = 3}, {.capacity = 1});
  CHECK((plain.head(0).scale() == 0.125F && scaled.head(0).scale() == 3));
  CHECK(kvmeld::attention_spec::group_of(32, 8) == 4);
  CHECK(kvmeld::attention_spec::group_of(8, 8) == 1);
}

}  // namespace head_ref_test
