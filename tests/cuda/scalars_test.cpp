// SPDX-License-Identifier: MIT
// The emulator's 16-bit scalars, beside the hardware's rules.
#include <catch2/catch.hpp>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {
namespace scalars_test {

TEST_CASE("16-bit scalars convert both ways, rounding to nearest even") {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const half h{static_cast<std::uint16_t>(bits)};
    const bfloat16 b{static_cast<std::uint16_t>(bits)};
    if ((bits & 0x7fffU) <= 0x7c00U) {
      REQUIRE(from_float<half>(to_float(h)).bits == bits);
    }
    if ((bits & 0x7fffU) <= 0x7f80U) {
      REQUIRE(from_float<bfloat16>(to_float(b)).bits == bits);
    }
  }
  CHECK(from_float<half>(2049.0F).bits == from_float<half>(2048.0F).bits);
  CHECK(from_float<half>(2051.0F).bits == from_float<half>(2052.0F).bits);
  CHECK(from_float<half>(65519.0F).bits == 0x7bffU);
  CHECK(from_float<half>(65520.0F).bits == 0x7c00U);
  CHECK(from_float<half>(0x1p-25F).bits == 0);
  CHECK(from_float<half>(0x1.8p-25F).bits == 1);
  CHECK(from_float<bfloat16>(257.0F).bits == from_float<bfloat16>(256.0F).bits);
  CHECK(from_float<bfloat16>(259.0F).bits == from_float<bfloat16>(260.0F).bits);
}

}  // namespace scalars_test
}  // namespace kvmeld::cuda
