// A head of any scalar and layout: the same rows, log-mass and positions as the head that it stands
// for.
#include "kvmeld/memory/head_ref.hpp"

#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/paged.hpp"
#include "kvmeld/score/dot.hpp"
#include "support/fixtures.hpp"

using kvmeld::index_t;

namespace {

std::vector<float> floats(const auto& row, index_t dim) {
  std::vector<float> x(static_cast<std::size_t>(dim));
  kvmeld::to_floats(row, dim, x.data());
  return x;
}

void stands_for(const auto& head) {
  const kvmeld::head_ref ref = kvmeld::detail::erased(head);
  const index_t dim = head.dim();
  REQUIRE(ref.length() == head.length());
  REQUIRE(ref.tokens_total() == head.tokens_total());
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

/// Inherits what `head_view` says of itself, and has rows of its own.
struct own_rows : kvmeld::head_view<float> {
  using head_view::head_view;
  kvmeld::row<float> key(index_t s) const { return head_view::key(length() - 1 - s); }
};

static_assert(
    std::same_as<kvmeld::detail::erased_head<kvmeld::head_view<Eigen::half>>, kvmeld::head_ref>);
static_assert(
    std::same_as<kvmeld::detail::erased_head<kvmeld::paged_head<float>>, kvmeld::head_ref>);
static_assert(std::same_as<kvmeld::detail::erased_head<own_rows>, own_rows>);
static_assert(std::same_as<kvmeld::detail::erased_head<kvmeld::head_ref>, kvmeld::head_ref>);

}  // namespace

TEMPLATE_TEST_CASE("a head_ref has the rows of its head", "[head_ref]", float, Eigen::half,
                   Eigen::bfloat16) {
  const index_t heads = 2, dim = 6, capacity = 12, tokens = 9;
  const auto keys = fixtures::normal(tokens * dim), values = fixtures::normal(tokens * dim);
  const kvmeld::cache_shape shape{.heads = heads, .group = 2, .dim = dim, .capacity = capacity};
  SECTION("contiguous") {
    kvmeld::cache<TestType> kv(shape);
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    stands_for(kv.head(1));
  }
  SECTION("values transposed") {
    std::vector<TestType> k(static_cast<std::size_t>(heads * capacity * dim)), v(k.size());
    kvmeld::strided_view<TestType> kv(shape, {k.data(), capacity * dim, dim, 1},
                                      {v.data(), capacity * dim, 1, capacity});
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    stands_for(kv.head(1));
  }
  SECTION("in pages") {
    const index_t slots = 4, pages = 8;
    std::vector<TestType> k(static_cast<std::size_t>(pages * slots * heads * dim)), v(k.size());
    std::vector<index_t> table{5, 0, 3};
    using layout = kvmeld::layout<TestType>;
    kvmeld::paged_view<TestType> kv(shape, layout::page_slot_head_dim(k.data(), slots, heads, dim),
                                    layout::page_head_slot_dim(v.data(), slots, heads, dim),
                                    {table.data(), slots, 0});
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    stands_for(kv.head(1));
  }
}
