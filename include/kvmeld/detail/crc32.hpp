// SPDX-License-Identifier: MIT
/// CRC-32, the checksum of what is saved.
#pragma once

#include <array>
#include <cstdint>  // std::uint32_t
#include <span>

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// The CRC-32 of zip and PNG (ISO 3309: polynomial 0xEDB88320, reflected). It finds accidents, not
/// malice.
class crc32 {
 public:
  void add(std::span<const unsigned char> bytes) {
    for (const unsigned char byte : bytes) {
      rest_ = table_[(rest_ ^ byte) & 0xFFU] ^ (rest_ >> 8U);
    }
  }
  /// Of all bytes so far.
  std::uint32_t value() const { return ~rest_; }

 private:
  /// The remainder of every byte.
  static constexpr std::array<std::uint32_t, 256> remainders() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) {
        rest = (rest & 1U) != 0 ? 0xEDB88320U ^ (rest >> 1U) : rest >> 1U;
      }
      table[byte] = rest;
    }
    return table;
  }

  std::array<std::uint32_t, 256> table_ = remainders();
  std::uint32_t rest_ = 0xFFFFFFFFU;
};

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
