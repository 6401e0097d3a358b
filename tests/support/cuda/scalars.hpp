// SPDX-License-Identifier: MIT
/// The device's scalars of 16 and 8 bits, for the emulator: the same bits, rounded to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvmeld::cuda {

struct half {
  std::uint16_t bits;
};
struct bfloat16 {
  std::uint16_t bits;
};

namespace emulator {

inline std::uint32_t bits_of(float x) {
  std::uint32_t u = 0;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float float_of(std::uint32_t u) {
  float x = 0;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

}  // namespace emulator

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return emulator::float_of(std::uint32_t{x.bits} << 16); }
inline float to_float(half x) {
  const std::uint32_t sign = (x.bits & 0x8000U) << 16, rest = x.bits & 0x7fffU;
  if (rest >= 0x7c00U) {  // Inf, NaN
    return emulator::float_of(sign | 0x7f800000U | (rest & 0x3ffU) << 13);
  }
  if (rest >= 0x400U) {
    return emulator::float_of(sign | ((rest << 13) + (112U << 23)));
  }
  const float tiny = static_cast<float>(rest) * 0x1p-24F;
  return sign != 0 ? -tiny : tiny;
}

/// e4m3: a sign, four bits of exponent, three of fraction.
inline float fp8_to_float(std::uint8_t bits) {
  const std::uint32_t rest = bits & 0x7fU;
  const float x = rest == 0x7fU ? NAN
                  : rest < 8    ? static_cast<float>(rest) * 0x1p-9F
                                : emulator::float_of((rest << 20) + (120U << 23));
  return (bits & 0x80U) != 0 ? -x : x;
}
inline std::uint8_t fp8_from_float(float x) {
  const std::uint32_t u = emulator::bits_of(x), size = u & 0x7fffffffU;
  std::uint32_t rest = 0x7fU;  // NaN, and what rounds to more than 448
  if (size < 0x3c800000U) {    // subnormal: units of 2^-9
    rest = static_cast<std::uint32_t>(std::nearbyint(std::fabs(x) * 0x1p9F));
  } else if (size <= 0x43e80000U) {
    rest = (size + 0x7ffffU + (size >> 20 & 1U) - (120U << 23)) >> 20;
  }
  return static_cast<std::uint8_t>((u >> 24 & 0x80U) | rest);
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {
  const std::uint32_t u = emulator::bits_of(x);
  if (x != x) {
    return {0x7fffU};
  }
  return {static_cast<std::uint16_t>((u + 0x7fffU + (u >> 16 & 1U)) >> 16)};
}
template <>
inline half from_float<half>(float x) {
  const std::uint32_t u = emulator::bits_of(x);
  const auto sign = static_cast<std::uint16_t>(u >> 16 & 0x8000U);
  const auto with = [sign](std::uint32_t rest) {
    return half{static_cast<std::uint16_t>(sign | rest)};
  };
  const std::uint32_t size = u & 0x7fffffffU;
  if (size > 0x7f800000U) {
    return with(0x7fffU);
  }
  if (size >= 0x477ff000U) {  // 65520 and more
    return with(0x7c00U);
  }
  if (size < 0x38800000U) {  // subnormal: units of 2^-24
    return with(static_cast<std::uint32_t>(std::nearbyint(std::fabs(x) * 0x1p24F)));
  }
  return with((size + 0xfffU + (size >> 13 & 1U) - (112U << 23)) >> 13);
}

}  // namespace kvmeld::cuda
