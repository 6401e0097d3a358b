// SPDX-License-Identifier: MIT
// The emulator's 16-bit scalars, beside the hardware's rules.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

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

TEST_CASE("e4m3 converts both ways, rounding to nearest even") {
  for (int bits = 0; bits < 0x100; ++bits) {
    const auto x = static_cast<std::uint8_t>(bits);
    const double whole = (bits & 7) + (bits & 0x78 ? 8 : 0), exponent = bits >> 3 & 15;
    const double size = std::ldexp(whole, static_cast<int>(std::max(exponent, 1.0)) - 10);
    if ((bits & 0x7f) == 0x7f) {
      REQUIRE(std::isnan(fp8_to_float(x)));
    } else {
      REQUIRE(double{fp8_to_float(x)} == (bits & 0x80 ? -size : size));
      REQUIRE(fp8_from_float(fp8_to_float(x)) == x);
    }
  }
  CHECK(fp8_from_float(17.0F) == fp8_from_float(16.0F));
  CHECK(fp8_from_float(19.0F) == fp8_from_float(20.0F));
  CHECK(fp8_from_float(464.0F) == 0x7e);
  CHECK(fp8_from_float(464.1F) == 0x7f);
  CHECK(fp8_from_float(-INFINITY) == 0xff);
  CHECK(fp8_from_float(0x1p-10F) == 0);
  CHECK(fp8_from_float(0x1.8p-10F) == 1);
}

}  // namespace scalars_test
}  // namespace kvmeld::cuda
