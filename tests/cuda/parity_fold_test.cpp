// fold on the device is the library's: queries remembered, leverage, pairs, rows and their mass.
#include <catch2/catch.hpp>

#include "cuda/step_parity.hpp"
#include "kvfold/policies/fold.hpp"

namespace kvfold::cuda {
namespace {

TEST_CASE("step: fold") {
  const fold p{.recent = 6, .decode = {.queries = 8}};
  const cache_case c{.heads = 2, .capacity = 30, .dim = 32, .group = 2};
  check_steps<float>(p, c, 20, {24, 27}, 12, data::random, 1e-5, 201);
}

}  // namespace
}  // namespace kvfold::cuda
