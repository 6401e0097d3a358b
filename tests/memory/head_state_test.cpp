// SPDX-License-Identifier: MIT
// A head's state as a value: what is copied or moved shares no memory with what it came from.
#include "kvmeld/memory/head_state.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/score/queries.hpp"

namespace head_state_test {

using kvmeld::as_size;
using kvmeld::head_state;
using kvmeld::index_t;

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

/// With numbers that 16 bits hold in every place.
head_state of_slots(index_t slots, index_t columns, std::size_t memory, index_t capacity) {
  const std::vector<kvmeld::slot_stat> kinds(as_size(columns), {kvmeld::slot_reduce::sum, 3});
  head_state state(kinds, memory, capacity, "p", false);
  state.extend(slots), state.count_queries(2);
  int next = 0;
  const auto number = [&] { return static_cast<float>(++next % 200) / 2; };
  for (index_t c = 0; c < columns; ++c) {
    std::ranges::generate(state.column(c), number);
  }
  std::ranges::generate(state.memory(), [&] { return 1000.1F + number(); });
  return state;
}

TEST_CASE("a state at rest keeps what it is told to, and has it where it is extended", "[state]") {
  const index_t slots = GENERATE(0, 1, 3, 64, 700), columns = GENERATE(0, 1, 3);
  const std::size_t memory = as_size(GENERATE(0, 1, 40, 3000));
  for (const index_t capacity : {slots, slots + 1, 2 * slots + 2000}) {
    for (const bool keeps : {false, true}) {
      for (const std::size_t kept : {std::size_t{0}, memory / 2, memory}) {
        CAPTURE(slots, columns, memory, capacity, keeps, kept);
        const head_state before = of_slots(slots, columns, memory, capacity);
        head_state state = before;
        state.rest(keeps, kept);
        REQUIRE(state.rests() == (as_size(columns, capacity) + memory > 0));
        if (!state.rests()) {
          continue;
        }
        const std::size_t bytes = 4 * kept + (keeps ? as_size(2 * columns, slots) : 0);
        CHECK(state.bytes() == bytes);
        CHECK((!KVMELD_MAPS_MEMORY || before.reserved_bytes() < 4096 ||
               state.reserved_bytes() < bytes + 4096));
        state.rest(false, 0);  // it does already
        CHECK((state.bytes() == bytes && state.memory_size() == memory && state.memory().empty()));
        head_state other({}, 0, 0, "p"), copied = of_slots(slots, columns, memory, slots + 9);
        other = state, copied.copy(state);
        for (head_state* const one : {&state, &other, &copied}) {
          CHECK((one->rests() && one->bytes() == bytes));
          one->extend(std::min(slots + 1, capacity));
          CHECK((!one->rests() && one->observed() == 2));
          for (index_t c = 0; c < columns; ++c) {
            std::vector<float> wanted(one->column(c).size(), 3.0F);
            std::ranges::copy(before.column(c).first(keeps ? as_size(slots) : 0), wanted.begin());
            CHECK(std::ranges::equal(one->column(c), wanted));
          }
          std::vector<float> floats(memory);
          std::ranges::copy(before.memory().first(kept), floats.begin());
          CHECK(std::ranges::equal(one->memory(), floats));
        }
      }
    }
  }
}

TEST_CASE("a state at rest keeps the upper 16 bits of columns", "[state]") {
  head_state state = of_slots(4, 1, 0, 4);
  const float numbers[] = {0.1F, -1e-30F, std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  std::ranges::copy(numbers, state.column(0).begin());
  state.rest(true, 0);
  state.extend(4);
  const auto got = state.column(0);
  CHECK((got[0] <= 0.1F && got[0] > 0.0996F && got[1] < 0 && got[2] == numbers[2]));
  CHECK(std::isnan(got[3]));
}

TEST_CASE("numbers of the caller's do not rest", "[state]") {
  std::vector<float> columns(8), memory(4);
  const kvmeld::slot_stat kinds[] = {{kvmeld::slot_reduce::sum, 3}};
  head_state over(kinds, {.columns = columns, .memory = memory, .capacity = 8}, "p");
  over.extend(3), over.memory()[2] = 5;
  over.rest(false, 0);
  CHECK((!over.rests() && over.length() == 3 && memory[2] == 5));
  head_state own = of_slots(3, 1, 4, 8);
  own.rest(true, 2);
  over.copy(own);
  CHECK((!over.rests() && over.observed() == 2));
  CHECK(columns == std::vector<float>{0.5F, 1, 1.5F, 0, 0, 0, 0, 0});
  CHECK(memory == std::vector<float>{1000.1F + 2, 1000.1F + 2.5F, 0, 0});
}

static_assert(std::is_nothrow_move_constructible_v<head_state>);
static_assert(std::is_nothrow_move_assignable_v<head_state>);

// A view of a temporary would dangle.
static_assert(viewable<const evaluate::reference_queries&>);
static_assert(!viewable<evaluate::reference_queries>);
static_assert(!viewable<const evaluate::reference_queries>);

}  // namespace head_state_test
