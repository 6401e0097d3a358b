// SPDX-License-Identifier: MIT
// Heads that are used again: by a view that moves, by another request, by a fork.
#include <catch2/catch.hpp>
#include <functional>
#include <type_traits>

#include "support/reused.hpp"

namespace reuse_test {

using fixtures::bytes_of;
using fixtures::cache;
using fixtures::every_policy;
using fixtures::everything;
using fixtures::heads;
using fixtures::normal;
using fixtures::paged_view;
using fixtures::policies;
using fixtures::refuses;
using fixtures::strided_view;
using fixtures::text;
using kvmeld::budget;
using kvmeld::errc;
using kvmeld::index_t;

template <class View>
constexpr bool moves_only =
    !std::is_copy_constructible_v<View> && !std::is_copy_assignable_v<View> &&
    std::is_nothrow_move_constructible_v<View> && std::is_nothrow_move_assignable_v<View>;
static_assert(moves_only<strided_view<float>> && moves_only<strided_view<Eigen::half>>);
static_assert(moves_only<paged_view<float>> && moves_only<paged_view<Eigen::bfloat16>>);

TEST_CASE("a view that was moved goes on over the same rows", "[views][paged]") {
  const auto moved = [](auto view) {
    const std::vector<float> x = normal(3 * 4);
    view.append(1, std::span(x), std::span(x));
    const auto before = bytes_of(view.head(1));
    const auto* const key = view.head(1).key(2).data;
    auto other = std::move(view);
    CHECK(bytes_of(other.head(1)) == before);
    CHECK((other.head(1).key(2).data == key && other.head(1).next_position() == 3));
  };
  std::vector<float> keys(2 * 8 * 4), values(keys.size());
  std::vector<kvmeld::index_t> table = {1, 3, 0, 2};
  moved(strided_view<float>({.heads = 2, .dim = 4, .capacity = 8}, {keys.data(), 32, 4},
                            {values.data(), 32, 4}));
  moved(paged_view<float>({.heads = 2, .dim = 4, .capacity = 8},
                          fixtures::layout<float>::page_head_slot_dim(keys.data(), 4, 1, 4),
                          fixtures::layout<float>::page_head_slot_dim(values.data(), 4, 1, 4),
                          {table.data(), 4, 2}));
}

TEST_CASE("a cleared head is as one that was never used", "[reuse]") {
  const text first, second;
  for (const auto& example : policies()) {
    INFO(example.name);
    heads used(example.policy), fresh(example.policy);
    used.prompt(0, first), used.decode(0, first, 0, text::steps);
    clear(used.kv.head(0), used.state[0]);
    CHECK(everything(used.kv, used.state) == everything(fresh.kv, fresh.state));
    used.prompt(0, second), fresh.prompt(0, second);
    CHECK(used.decode(0, second, 0, text::steps) == fresh.decode(0, second, 0, text::steps));
    CHECK(everything(used.kv, used.state) == everything(fresh.kv, fresh.state));
  }
}

TEST_CASE("a copied head goes on as the one that it was, and neither sees the other", "[reuse]") {
  const text x, y;
  for (const auto& example : policies()) {
    INFO(example.name);
    heads one(example.policy), fork(example.policy, 3);
    one.prompt(0, x), one.decode(0, x, 0, 10);
    fork.prompt(0, x), fork.decode(0, x, 0, 10);
    fork.prompt(1, y), fork.prompt(2, y);
    const auto bystander = bytes_of(fork.kv.head(2));
    copy(fork.kv.head(0), fork.state[0], fork.kv.head(1), fork.state[1]);
    const auto other = fork.decode(1, y, 10, text::steps);  // the fork goes elsewhere
    const auto wanted = one.decode(0, x, 10, text::steps);
    CHECK(fork.decode(0, x, 10, text::steps) == wanted);
    CHECK(bytes_of(fork.kv.head(0)) == bytes_of(one.kv.head(0)));
    CHECK(bytes_of(fork.kv.head(2)) == bystander);
    CHECK((other != wanted || !kvmeld::declared(example.policy).supports_decode()));
    heads again(example.policy);  // from one cache to another
    one = heads(example.policy), one.prompt(0, x);
    copy(one.kv.head(0), one.state[0], again.kv.head(0), again.state[0]);
    CHECK(everything(again.kv, again.state) == everything(one.kv, one.state));
    CHECK(again.decode(0, x, 0, 9) == one.decode(0, x, 0, 9));
  }
}

TEST_CASE("a state over the caller's memory is what one of its own is", "[reuse]") {
  const text x;
  for (const auto& example : policies()) {
    INFO(example.name);
    const auto& p = example.policy;
    heads own(p), over(p);
    const auto kinds = kvmeld::declared(p).slot_stats();
    const std::size_t size = kvmeld::declared(p).memory(text::dim, text::group, 100);
    std::vector<float> columns(kinds.size() * 100);
    std::vector<float, Eigen::aligned_allocator<float>> memory(size);
    const auto at = [&](index_t length, std::int64_t queries) {
      return kvmeld::head_state(kinds, {columns, memory, 100, 0, length, queries}, p.name());
    };
    over.state[0] = at(0, 0);
    own.prompt(0, x), over.prompt(0, x);
    // As in an engine that keeps numbers and lengths alone from call to call.
    over.state[0] = at(over.state[0].length(), over.state[0].observed());
    fixtures::state fork = over.state;
    const auto before = everything(over.kv, over.state);
    CHECK(over.decode(0, x, 0, text::steps) == own.decode(0, x, 0, text::steps));
    CHECK(everything(over.kv, over.state) == everything(own.kv, own.state));
    if (!columns.empty()) {
      CHECK(over.state[0].column(0).data() == columns.data());
      CHECK(fork[0].column(0).data() != columns.data());
    }
    over.state[0].clear();
    heads restored(p);
    restored.prompt(0, x);
    CHECK(everything(restored.kv, fork) == before);  // a copy owns its numbers
  }
}

TEST_CASE("a state over memory that does not fit is refused", "[reuse][errors]") {
  const auto kinds = kvmeld::slot_stats_of(kvmeld::h2o{});
  std::vector<float> columns(100);
  const auto at = [&](std::size_t floats, index_t length, std::int64_t queries) {
    return kvmeld::head_state(
        kinds, {std::span(columns).first(floats), {}, 100, 0, length, queries}, "h2o");
  };
  refuses(errc::invalid_argument, "state: expected columns [1, 100], got 99 floats",
          [&] { at(99, 0, 0); });
  refuses(errc::invalid_argument, "state: expected 0 to 100 slots, got 101",
          [&] { at(100, 101, 0); });
  refuses(errc::invalid_argument, "state: expected 0 to 100 slots, got -1",
          [&] { at(100, -1, 0); });
  refuses(errc::invalid_argument, "state: expected at least 0 queries, got -1",
          [&] { at(100, 0, -1); });
}

TEST_CASE("what cannot be copied is refused, and nothing changes", "[reuse][errors]") {
  const text x;
  heads three(kvmeld::h2o{}, 3), other(kvmeld::zsmerge{}, 3);
  three.prompt(1, x);
  const auto before = everything(three.kv, three.state);
  const auto head = three.kv.head(1);
  const auto to = [&](const heads& source, fixtures::cache_shape shape) {
    cache<float> kv(shape);
    auto state = make_head_state(source.policy, kv.head(0));
    copy(head, three.state[1], kv.head(0), state);
  };
  refuses(errc::invalid_argument, "copy: expected a head of dim 8, got 4",
          [&] { to(three, {.heads = 1, .group = 2, .dim = 4, .capacity = 100}); });
  refuses(errc::no_capacity, "copy: expected a head of at least 30 slots, got 29",
          [&] { to(three, {.heads = 1, .group = 2, .dim = 8, .capacity = 29}); });
  refuses(errc::invalid_argument, "copy: expected a state for zsmerge, got one for h2o",
          [&] { to(other, {.heads = 1, .group = 2, .dim = 8, .capacity = 100}); });
  CHECK(everything(three.kv, three.state) == before);
}

TEST_CASE("heads in pages are copied into pages of their own, or keep what they share", "[reuse]") {
  constexpr index_t dim = 4, slots = 2;
  std::vector<float> keys(8 * slots * dim), values(keys.size());
  const auto layout = [&](std::vector<float>& x) {  // a page is one head's
    return fixtures::layout<float>{x.data(), 0, dim, 1, slots * dim};
  };
  std::vector<index_t> table = {5, 2, 7, -1, /* head 1 */ 5, 3, -1, -1};
  fixtures::paged_view<float> kv({.heads = 2, .dim = dim, .capacity = 4 * slots}, layout(keys),
                                 layout(values), {table.data(), slots, 4});
  auto state = fixtures::make_state(kvmeld::streaming_llm{}, kv);
  const auto x = normal(5 * dim), y = normal(3 * dim);
  kv.append(0, std::span(x), std::span(x));
  const auto before = bytes_of(kv.head(0));
  refuses(errc::no_page, "expected a page for slot 4, got -1",
          [&] { copy(kv.head(0), state[0], kv.head(1), state[1]); });
  CHECK(kv.head(1).length() == 0);
  table[6] = 0;
  copy(kv.head(0), state[0], kv.head(1), state[1]);
  CHECK(bytes_of(kv.head(1)) == before);
  kv.head(1).truncate(3);
  kv.append(1, std::span(y), std::span(y));  // into pages 3 and 0, and not into the shared one
  CHECK(bytes_of(kv.head(0)) == before);
  clear(kv.head(1), state[1]);
  CHECK((kv.head(1).length() == 0 && kv.head(1).next_position() == 0 && table[6] == 0));
  CHECK(bytes_of(kv.head(0)) == before);
}

}  // namespace reuse_test
