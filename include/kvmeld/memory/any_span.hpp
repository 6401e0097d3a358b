// SPDX-License-Identifier: MIT
/// Contiguous numbers of whatever scalar, as an engine hands them in.
#pragma once

#include <concepts>  // std::same_as
#include <cstddef>   // std::size_t
#include <ranges>    // std::ranges::contiguous_range
#include <span>

#include "kvmeld/memory/convert.hpp"

namespace kvmeld {
inline namespace v0 {

/// Numbers in float, half or bfloat16, read only; made of a `std::span` or a `std::vector` of them.
class any_span {
 public:
  any_span() = default;
  template <std::ranges::contiguous_range R>
  requires std::ranges::sized_range<R> && plain_scalar<std::ranges::range_value_t<R>> any_span(
      const R& numbers)  // NOLINT: as std::span is made
      : data_(reinterpret_cast<const std::byte*>(std::ranges::data(numbers))),
        size_(std::ranges::size(numbers)),
        type_(storage_of<std::ranges::range_value_t<R>>) {}

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  /// Calls `f` with the span as what it is.
  template <class F>
  decltype(auto) visit(F&& f) const {
    if (type_ == storage::f32) {
      return f(as<float>());
    }
    return type_ == storage::f16 ? f(as<Eigen::half>()) : f(as<Eigen::bfloat16>());
  }

  /// Numbers `first` to `first + count` − 1 as floats: in place where they are, in `buffer [count]`
  /// otherwise.
  const float* floats(std::ptrdiff_t first, index_t count, float* buffer) const {
    return visit([&]<class Scalar>(std::span<const Scalar> all) -> const float* {
      if constexpr (std::same_as<Scalar, float>) {
        return all.data() + first;
      } else {
        to_floats(row<const Scalar>{all.data() + first}, count, buffer);
        return buffer;
      }
    });
  }

 private:
  template <plain_scalar Scalar>
  std::span<const Scalar> as() const {
    return {reinterpret_cast<const Scalar*>(data_), size_};
  }

  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  storage type_ = storage::f32;
};

/// Refuses NaN and Inf, naming the first.
inline void expect_finite(const char* expected, const any_span& x) {
  x.visit([&](auto numbers) {
    expect_finite(expected, numbers.data(), static_cast<std::ptrdiff_t>(numbers.size()));
  });
}

}  // namespace v0
}  // namespace kvmeld
