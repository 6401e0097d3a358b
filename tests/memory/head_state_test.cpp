// SPDX-License-Identifier: MIT
// A head's state as a value: what is copied or moved shares no memory with what it came from.
#include "kvmeld/memory/head_state.hpp"

#include <catch2/catch.hpp>
#include <type_traits>
#include <vector>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/score/queries.hpp"

namespace head_state_test {

using kvmeld::head_state;

head_state filled() {
  const kvmeld::slot_stat kinds[] = {{kvmeld::slot_reduce::sum, 1}};
  head_state state(kinds, 4, 8, "p");
  state.extend(3);
  state.count_queries(5);
  state.memory()[0] = 42;
  state.column(0)[0] = 7;
  return state;
}

void check_filled(const head_state& state) {
  REQUIRE(state.length() == 3);
  CHECK(state.policy() == "p");
  CHECK(state.capacity() == 8);
  CHECK(state.observed() == 5);
  CHECK(state.memory()[0] == 42);
  CHECK(state.column(0)[0] == 7);
}

void check_empty(const head_state& state) {
  CHECK(state.policy().empty());
  CHECK(state.length() == 0);
  CHECK(state.slot_stats() == 0);
  CHECK(state.capacity() == 0);
  CHECK(state.memory_capacity() == 0);
  CHECK(state.observed() == 0);
  CHECK(state.memory().empty());
  CHECK(state.bytes() == 0);
}

template <class T>
concept viewable = requires(T&& x) {
  std::forward<T>(x).view();
};

TEST_CASE("a state that was moved from is empty, and writes nowhere", "[state]") {
  head_state from = filled();
  SECTION("moved to a new one") {
    head_state to = std::move(from);
    check_empty(from);
    from.clear();
    CHECK_THROWS_AS(from.extend(3), kvmeld::error);
    check_filled(to);
  }
  SECTION("moved to one that had numbers") {
    head_state to({}, 2, 20, "other");
    to = std::move(from);
    check_empty(from);
    from.clear();
    check_filled(to);
    from = std::move(to);  // and back
    check_filled(from);
    check_empty(to);
  }
  SECTION("one over the caller's memory") {
    std::vector<float> columns(8), memory(4);
    const kvmeld::slot_stat kinds[] = {{kvmeld::slot_reduce::sum, 1}};
    head_state over(kinds, {.columns = columns, .memory = memory, .capacity = 8}, "p");
    head_state to = std::move(over);
    memory[1] = 3;
    CHECK(to.memory()[1] == 3);
    check_empty(over);
    over.clear();
    CHECK(memory[1] == 3);
  }
  SECTION("to itself") {
    head_state& same = from;
    from = std::move(same);
    check_filled(from);
  }
}

TEST_CASE("a copied state owns its numbers", "[state]") {
  head_state from = filled();
  head_state to({}, 0, 1);
  to = from;
  from.clear();
  check_filled(to);
}

static_assert(std::is_nothrow_move_constructible_v<head_state>);
static_assert(std::is_nothrow_move_assignable_v<head_state>);

// A view of a temporary would dangle.
static_assert(viewable<const evaluate::reference_queries&>);
static_assert(!viewable<evaluate::reference_queries>);
static_assert(!viewable<const evaluate::reference_queries>);

}  // namespace head_state_test
