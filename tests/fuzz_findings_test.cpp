// What fuzzing (tests/fuzz) has found, one test each.
#include <catch2/catch.hpp>

#include "kvfold/plan.hpp"

TEST_CASE("fuzz: a plan of less than no slots is refused, as any other", "[errors]") {
  for (const kvfold::index_t length : {-1, -5, std::numeric_limits<kvfold::index_t>::min()}) {
    kvfold::merge_plan plan;
    plan.reset(length);
    CHECK_THROWS_AS(check(plan), kvfold::invalid_argument);  // it was std::length_error
    CHECK_THROWS_WITH(check(plan), Catch::Contains("at least 0 slots expected"));
  }
}
