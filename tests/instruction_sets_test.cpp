// SPDX-License-Identifier: MIT
// Files of one program with other -march flags: each calls what it was compiled to.
#include <catch2/catch.hpp>

#include "support/widening.hpp"

namespace instruction_sets_test {

TEST_CASE("two instruction sets have a function each", "[convert]") {
  // One symbol for both would run the instructions of whichever file was linked first.
  CHECK(widening::of<0>() != widening::of<1>());
}

}  // namespace instruction_sets_test
