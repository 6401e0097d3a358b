// Heads that are used again: by a view that moves, by another request, by a fork, in less memory.
#include <catch2/catch.hpp>
#include <type_traits>

#include "support/fixtures.hpp"

namespace {

using fixtures::bytes_of;
using fixtures::normal;
using kvfold::paged_view;
using kvfold::strided_view;

template <class View>
constexpr bool moves_only =
    !std::is_copy_constructible_v<View> && !std::is_copy_assignable_v<View> &&
    std::is_nothrow_move_constructible_v<View> && std::is_nothrow_move_assignable_v<View>;
static_assert(moves_only<strided_view<float>> && moves_only<strided_view<Eigen::half>>);
static_assert(moves_only<paged_view<float>> && moves_only<paged_view<Eigen::bfloat16>>);

}  // namespace

TEST_CASE("a view that was moved goes on over the same rows", "[views][paged]") {
  const auto moved = [](auto view) {
    const std::vector<float> x = normal(3 * 4);
    view.append(1, std::span(x), std::span(x));
    const auto before = bytes_of(view.head(1));
    const auto* const key = view.head(1).key(2).data;
    auto other = std::move(view);
    CHECK(bytes_of(other.head(1)) == before);
    CHECK((other.head(1).key(2).data == key && other.head(1).tokens_total() == 3));
  };
  std::vector<float> keys(2 * 8 * 4), values(keys.size());
  std::vector<kvfold::index_t> table = {1, 3, 0, 2};
  moved(strided_view<float>({.heads = 2, .dim = 4, .capacity = 8}, {keys.data(), 32, 4},
                            {values.data(), 32, 4}));
  moved(paged_view<float>({.heads = 2, .dim = 4, .capacity = 8},
                          kvfold::paged_layout<float>::page_head_slot_dim(keys.data(), 4, 1, 4),
                          kvfold::paged_layout<float>::page_head_slot_dim(values.data(), 4, 1, 4),
                          {table.data(), 4, 2}));
}
