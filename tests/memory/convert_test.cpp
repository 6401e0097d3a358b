// Rows as floats: exact, for every number that two bytes can hold.
#include "kvmeld/memory/convert.hpp"

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <vector>

using kvmeld::index_t;

namespace {

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

}  // namespace

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
