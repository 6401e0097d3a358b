// SPDX-License-Identifier: MIT
// Rows as floats: exact, for every number that two bytes can hold.
#include "kvmeld/memory/convert.hpp"

#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>

namespace convert_test {

#endif

using kvmeld::index_t;

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

/// Every pattern of 16 bits.
template <class Scalar>
std::vector<Scalar> all() {
  std::vector<Scalar> x(1 << 16);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    std::memcpy(static_cast<void*>(&x[i]), &bits, sizeof(bits));
  }
  return x;
}

/// While it lives, denormal floats are 0, as in a process linked with -ffast-math.
struct denormals_are_zero {
#ifdef __SSE2__
  unsigned before = _mm_getcsr();
  denormals_are_zero() { _mm_setcsr(before | 0x8040U); }  // FTZ, DAZ
  ~denormals_are_zero() { _mm_setcsr(before); }
#endif
};

/// Of a half's bits, by its definition.
float value_of(std::size_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 0x1FU);
  const double fraction = static_cast<double>(bits & 0x3FFU);
  const double magnitude = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                           : exponent == 0 ? fraction * 0x1p-24
                                           : std::ldexp(fraction + 1024, exponent - 25);
  return static_cast<float>((bits & 0x8000U) != 0 ? -magnitude : magnitude);
}

TEST_CASE("halves and Q8_0 are read alike where denormal floats are 0", "[convert][q8_0]") {
  const denormals_are_zero until_the_end;
#ifdef __SSE2__
  volatile float tiny = 1e-40F;
  REQUIRE(std::bit_cast<std::uint32_t>(tiny * 0.5F) == 0);
#endif
  const auto halves = all<Eigen::half>();
  std::vector<float> out(halves.size());
  kvmeld::to_floats(kvmeld::row<const Eigen::half>{halves.data()}, 1 << 16, out.data());
  int wrong = 0, wrong_by_bits = 0, wrong_rows = 0, wrong_numbers = 0;
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const float value = value_of(i);
    wrong += same(out[i], value) ? 0 : 1;
    wrong_by_bits += same(kvmeld::detail::half_bits_to_float(halves[i].x), value) ? 0 : 1;
    kvmeld::q8_0 block;
    block.scale = halves[i];
    const std::int8_t codes[] = {-127, -1, 1, 90, 127};
    std::copy(std::begin(codes), std::end(codes), block.codes);
    float row[kvmeld::q8_0::size];
    kvmeld::to_floats(kvmeld::row<kvmeld::q8_0>{&block}, kvmeld::q8_0::size, row);
    for (int c = 0; c < 5; ++c) {
      const float number = static_cast<float>(codes[c]) * value;
      wrong_rows += same(row[c], number) ? 0 : 1;
      wrong_numbers += same(block[c], number) ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  CHECK(wrong_by_bits == 0);
  CHECK(wrong_rows == 0);
  CHECK(wrong_numbers == 0);
}

TEST_CASE("Q8_0 keeps small numbers where denormal floats are 0", "[convert][q8_0]") {
  std::vector<float> x(kvmeld::q8_0::size), flushed(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = (i % 2 == 0 ? -0.005F : 0.005F) / static_cast<float>(i + 1);
  }
  const auto block = kvmeld::q8_0::of(x.data());
  kvmeld::q8_0 same_block;
  {
    const denormals_are_zero in_here;
    same_block = kvmeld::q8_0::of(x.data());
    kvmeld::to_floats(kvmeld::row<kvmeld::q8_0>{&same_block}, kvmeld::q8_0::size, flushed.data());
  }
  CHECK(std::memcmp(&block, &same_block, sizeof(block)) == 0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    CHECK(std::abs(flushed[i] - x[i]) <= 0.005F / 127 * 0.51F);
  }
}

TEMPLATE_TEST_CASE("every half and bfloat16 becomes its float", "[convert]", Eigen::half,
                   Eigen::bfloat16) {
  const auto x = all<TestType>();
  std::vector<float> out(x.size());
  const index_t some = GENERATE(1, 7, 8, 64, 1 << 16), step = GENERATE(1, 2);
  for (index_t at = 0; at + (some - 1) * step < 1 << 16; at += some * step) {
    kvmeld::to_floats(kvmeld::row<const TestType>{x.data() + at, step}, some, out.data());
    for (index_t i = 0; i < some; ++i) {
      const auto from = x[static_cast<std::size_t>(at + i * step)];
      if (!same(out[static_cast<std::size_t>(i)], static_cast<float>(from))) {
        CAPTURE(at, i);
        CHECK(out[static_cast<std::size_t>(i)] == static_cast<float>(from));
      }
    }
  }
  SUCCEED();
}

TEST_CASE("halves without instructions for them are the same", "[convert]") {
  int wrong = 0;
  for (const Eigen::half x : all<Eigen::half>()) {
    wrong += same(kvmeld::detail::half_bits_to_float(x.x), static_cast<float>(x)) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

}  // namespace convert_test
