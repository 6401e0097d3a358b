// SPDX-License-Identifier: MIT
/// Numbers as bytes in a stream, lowest byte first whatever the machine, with a checksum.
#pragma once

#include <array>
#include <bit>      // std::bit_width
#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint32_t
#include <cstring>  // std::memcpy
#include <istream>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <tuple>  // std::tuple_element_t
#include <vector>

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {
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

/// The unsigned integer with as many bits as a number. Numbers are copied as bits and never
/// converted: a policy's memory may hold integers in its floats.
template <class T>
using bits_of =
    std::tuple_element_t<std::bit_width(sizeof(T)) - 1,
                         std::tuple<std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>>;

template <class T>
void to_bytes(const T& x, unsigned char* bytes) {
  static_assert(sizeof(T) == sizeof(bits_of<T>));
  bits_of<T> bits;
  std::memcpy(&bits, &x, sizeof bits);
  for (std::size_t i = 0; i < sizeof bits; ++i) {
    bytes[i] = static_cast<unsigned char>((bits >> (8 * i)) & 0xFFU);
  }
}

template <class T>
void from_bytes(const unsigned char* bytes, T& x) {
  bits_of<T> bits = 0;
  for (std::size_t i = 0; i < sizeof bits; ++i) {
    bits = static_cast<bits_of<T>>(bits | (static_cast<bits_of<T>>(bytes[i]) << (8 * i)));
  }
  std::memcpy(static_cast<void*>(&x), &bits, sizeof bits);
}

/// Writes blocks; `finish` ends with the checksum of everything before it.
class byte_writer {
 public:
  explicit byte_writer(std::ostream& out) : out_(out), block_(1 << 16) {}

  template <class T>
  void put(const T& x) {
    if (block_.size() - used_ < sizeof x) {
      flush();
    }
    to_bytes(x, block_.data() + used_);
    used_ += sizeof x;
  }
  void put_text(std::string_view text) {
    for (const char c : text) {
      put(c);
    }
  }
  void finish() {
    flush();
    put(sum_.value());
    flush();
    out_.flush();
    expects(errc::corrupt_file, out_.good(),
            "save: expected a stream that takes all bytes, got a failed one");
  }

 private:
  void flush() {
    sum_.add(std::span(block_).first(used_));
    out_.write(reinterpret_cast<const char*>(block_.data()), static_cast<std::streamsize>(used_));
    used_ = 0;
  }

  std::ostream& out_;
  std::vector<unsigned char> block_;
  std::size_t used_ = 0;
  crc32 sum_;
};

/// Reads what a `byte_writer` wrote. Refused: an end too early, another checksum.
class byte_reader {
 public:
  explicit byte_reader(std::istream& in) : in_(in) {}

  void get(std::span<unsigned char> bytes) {
    in_.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    const auto got = as_size(in_.gcount());
    expects(errc::corrupt_file, got == bytes.size(), "load: expected ", bytes.size(),
            " bytes after the first ", before_, ", got ", got, " (truncated)");
    before_ += got;
    sum_.add(bytes);
  }
  template <class T>
  T get() {
    unsigned char bytes[sizeof(T)];
    get(bytes);
    T x{};
    from_bytes(bytes, x);
    return x;
  }
  std::string get_text(std::size_t size) {
    std::vector<unsigned char> bytes(size);
    get(bytes);
    return {bytes.begin(), bytes.end()};
  }
  void finish() {
    const std::uint32_t got = sum_.value(), wanted = get<std::uint32_t>();
    expects(errc::corrupt_file, got == wanted, "load: expected a checksum of ", wanted, ", got ",
            got, " (changed bytes)");
  }

 private:
  std::istream& in_;
  std::size_t before_ = 0;
  crc32 sum_;
};

}  // namespace detail
}  // namespace kvmeld::inline v0
