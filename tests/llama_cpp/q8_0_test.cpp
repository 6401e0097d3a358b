// SPDX-License-Identifier: MIT
// Q8_0 and Q4_0 are ggml's own: its functions read what we store, and we read what they store.
#include <ggml.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/row.hpp"
#include "support/random.hpp"

namespace llama_cpp_q8_0_test {

TEMPLATE_TEST_CASE("rows in blocks are ggml's, both ways", "[q8_0]", kvmeld::q8_0, kvmeld::q4_0) {
  constexpr bool four_bits = std::same_as<TestType, kvmeld::q4_0>;
  const auto* const traits = ggml_get_type_traits(four_bits ? GGML_TYPE_Q4_0 : GGML_TYPE_Q8_0);
  REQUIRE(traits->type_size == sizeof(TestType));
  REQUIRE(traits->blck_size == TestType::size);
  constexpr kvmeld::index_t dim = 128;
  std::normal_distribution<float> gauss;
  for (const float size : {1e-3F, 1.0F, 300.0F}) {
    std::vector<float> x(dim), ours(dim), theirs(dim);
    for (float& e : x) {
      e = size * gauss(streams::floats);
    }
    std::vector<TestType> blocks(dim / TestType::size), by_ggml = blocks;
    const kvmeld::row<TestType> row{blocks.data()};
    kvmeld::detail::store_row(x.data(), row, dim);
    kvmeld::to_floats(row, dim, ours.data());
    traits->to_float(blocks.data(), theirs.data(), dim);
    CHECK(ours == theirs);
    traits->from_float_ref(x.data(), by_ggml.data(), dim);
    kvmeld::to_floats(kvmeld::row<TestType>{by_ggml.data()}, dim, theirs.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      // A number that lies between two codes may go either way: theirs go by the scale in float.
      const auto scale = std::abs(static_cast<float>(blocks[i / 32].scale));
      CHECK(std::abs(theirs[i] - x[i]) <= (four_bits ? 1.07F : 0.57F) * scale);
      CHECK(std::abs(theirs[i] - ours[i]) <= 1.001F * scale);
      CHECK(by_ggml[i / 32].scale == blocks[i / 32].scale);
    }
  }
}

}  // namespace llama_cpp_q8_0_test
