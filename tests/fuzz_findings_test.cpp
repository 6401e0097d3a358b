// What fuzzing (tests/fuzz) has found, one test each.
#include <catch2/catch.hpp>

#include "kvfold/plan.hpp"
#include "kvfold/queries.hpp"

TEST_CASE("fuzz: a plan of less than no slots is refused, as any other", "[errors]") {
  for (const kvfold::index_t length : {-1, -5, std::numeric_limits<kvfold::index_t>::min()}) {
    kvfold::merge_plan plan;
    plan.reset(length);
    CHECK_THROWS_AS(check(plan), kvfold::invalid_argument);  // it was std::length_error
    CHECK_THROWS_WITH(check(plan), Catch::Contains("at least 0 slots expected"));
  }
}

TEST_CASE("fuzz: no queries of any head are no queries", "[errors]") {
  const auto none = kvfold::prompt_queries<float>(nullptr, 0, 3, 2, 4);
  for (const kvfold::index_t h : {0, 1, 2}) {
    CHECK(none.of(h).data == nullptr);  // it was null and an offset
    CHECK(none.of(h).last(5).data == nullptr);
  }
}
