// SPDX-License-Identifier: MIT
// Files of one program with other -march flags: each calls what it was compiled to.
#include <catch2/catch.hpp>

#include "support/widening.hpp"

namespace instruction_sets_test {

TEST_CASE("two instruction sets have a function each", "[convert]") {
  // One symbol for both would run the instructions of whichever file was linked first.
  CHECK(widening::of<0>() != widening::of<1>());
}

TEST_CASE("in each of them rows in blocks are attended to as one by one, to the bit", "[codes]") {
  CHECK(widening::codes_as_one_by_one<0>());
  CHECK(widening::codes_as_one_by_one<1>());
}

}  // namespace instruction_sets_test
