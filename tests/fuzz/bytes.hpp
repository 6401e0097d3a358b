// SPDX-License-Identifier: MIT
// What a fuzzer's bytes stand for: numbers one after another, and zeros when they are used up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace fuzz {

class bytes {
 public:
  bytes(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

  bool empty() const { return rest_.empty(); }
  std::span<const std::uint8_t> rest() const { return rest_; }

  /// The next number, whatever its bits.
  template <class T>
  T next() {
    T x{};
    const std::size_t n = std::min(sizeof x, rest_.size());
    std::memcpy(&x, rest_.data(), n);
    rest_ = rest_.subspan(n);
    return x;
  }
  /// `0 .. below − 1`
  int below(int below) { return next<std::uint8_t>() % below; }
  /// Mostly ordinary numbers, and now and then any bits: NaN, Inf, tiny, huge.
  float number() {
    const int kind = below(16);
    return kind == 0 ? next<float>() : static_cast<float>(next<std::int8_t>()) / 16.0F;
  }
  std::vector<float> numbers(int n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    std::generate(x.begin(), x.end(), [&] { return number(); });
    return x;
  }

 private:
  std::span<const std::uint8_t> rest_;
};

/// As bits: NaN is itself.
inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// What must hold: a crash that the fuzzer keeps the input of.
inline void must(bool ok, const char* what) {
  if (!ok) {
    std::fprintf(stderr, "broken law: %s\n", what);
    std::abort();
  }
}

}  // namespace fuzz
