// SPDX-License-Identifier: MIT
/// Rows as floats, at the width of a vector; numbers of any scalar, as engines hand them in.
#pragma once

#include <algorithm>   // std::copy_n, std::min
#include <concepts>    // std::same_as
#include <functional>  // std::less
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/memory/widen.hpp"

namespace kvmeld::inline v0 {

inline namespace KVMELD_INSTRUCTIONS {

/// Copies `x [dim]` into `out` as floats: exact, whatever the storage.
template <class Scalar>
requires plain_scalar<std::remove_const_t<Scalar>>
void to_floats(row<Scalar> x, index_t dim, float* out) {
  using scalar = std::remove_const_t<Scalar>;
  if (x.step != 1) {
    for (index_t i = 0; i < dim; ++i) {
      out[i] = static_cast<float>(x[i]);
    }
  } else if constexpr (std::same_as<scalar, float>) {
    std::copy_n(x.data, dim, out);
  } else {
    index_t i = 0;
    if constexpr (detail::widens<scalar>) {
      for (; i + detail::lanes <= dim; i += detail::lanes) {
        Eigen::internal::pstoreu(out + i, detail::widened(x.data + i));
      }
    }
    for (; i < dim; ++i) {
      out[i] = detail::number(x.data, i);
    }
  }
}

inline void to_floats(row<q8_0> x, index_t dim, float* out) {
  for (index_t begin = 0; begin < dim; begin += q8_0::size) {
    const q8_0& block = x.data[begin / q8_0::size];
    const float scale = block.scale_as_float();
    float numbers[q8_0::size];  // local: bytes may alias what `out` points to
    for (index_t i = 0; i < q8_0::size; ++i) {
      numbers[i] = scale * static_cast<float>(block.codes[i]);
    }
    std::copy_n(numbers, std::min(dim - begin, q8_0::size), out + begin);
  }
}

inline void to_floats(row<q4_0> x, index_t dim, float* out) {
  constexpr index_t half = q4_0::size / 2;
  for (index_t begin = 0; begin < dim; begin += q4_0::size) {
    const q4_0& block = x.data[begin / q4_0::size];
    const float scale = block.scale_as_float();
    if (dim - begin >= q4_0::size) [[likely]] {
      for (index_t i = 0; i < half; ++i) {
        out[begin + i] = q4_0::number(block.codes[i], scale);
        out[begin + half + i] = q4_0::number(block.codes[i] >> 4, scale);
      }
    } else {
      for (index_t i = 0; i < dim - begin; ++i) {
        out[begin + i] = block[i];
      }
    }
  }
}

inline void to_floats(row<any_scalar> x, index_t dim, float* out) {
  x.visit([&](auto typed) { to_floats(typed, dim, out); });
}

}  // namespace KVMELD_INSTRUCTIONS

/// The value of slot `s` as the model has it, `out [value_dim]`: rotated back where it is held
/// rotated.
inline void value_to_floats(const head_ref& head, index_t s, float* out) {
  to_floats(head.value(s), head.value_dim(), out);
  if (head.rotates_values()) {
    detail::hadamard(out, head.value_dim());
  }
}

namespace detail {

/// `from` in the storage of `to`: rounded once, to the nearest.
inline void convert_row(row<any_scalar> to, row<any_scalar> from, index_t dim) {
  constexpr index_t chunk = 64;  // whole blocks
  float x[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(from.from(begin), n, x);
    store_row(x, to.from(begin), n);
  }
}

/// All that `from` holds, and its lengths, to a head that has room for it. Rows that both have at
/// the same place stay where they are.
inline void copy_slots(const head_ref& from, const head_ref& to) {
  const auto copy = [](row<any_scalar> x, row<any_scalar> y, index_t dim) {
    if (x.type != y.type) {
      convert_row(x, y, dim);
    } else if (x.data != y.data) {
      copy_row(x, y, dim);
    }
  };
  const index_t length = from.length();
  if (to.metadata().length != from.metadata().length) {  // else the same head, by another table
    to.truncate(0);
    to.restore(length, from.next_position());
  }
  for (index_t s = 0; s < length; ++s) {
    copy(to.key(s), from.key(s), from.dim());
    if (from.rotates_values() == to.rotates_values() || to.one_memory()) {
      copy(to.value(s), from.value(s), to.own_value_dim());
    } else {
      float x[4096];  // the longest row
      value_to_floats(from, s, x);
      to.store_value(x, s);
    }
    to.log_mass(s) = from.log_mass(s);
    to.position(s) = from.position(s);
  }
}

}  // namespace detail

/// Numbers in float, half or bfloat16, read only; made of a `std::span` or a `std::vector` of them.
class any_span {
 public:
  any_span() = default;
  template <class R>
  requires plain_scalar<detail::element_of<const R>> any_span(
      const R& numbers)  // NOLINT: as std::span is made
      : data_(std::as_bytes(std::span(numbers)).data()),
        size_(std::span(numbers).size()),
        type_(storage_of<detail::element_of<const R>>) {}

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * element_bytes(type_); }

  /// Have the two a byte in common?
  bool overlaps(const any_span& other) const {
    const std::less<> before;
    return before(data_, other.data_ + other.bytes()) && before(other.data_, data_ + bytes());
  }

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

  /// All of them as floats.
  std::vector<float> all() const {
    return visit([](auto numbers) {
      std::vector<float> x(numbers.size());
      to_floats(row<const typename decltype(numbers)::value_type>{numbers.data()},
                static_cast<index_t>(x.size()), x.data());
      return x;
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

namespace detail {

/// Refuses rows of another size than `shape` says, and null: "call: expected what [shape]".
inline void expect_size(const char* call, const char* what, const any_span& x,
                        std::initializer_list<index_t> shape) {
  std::size_t wanted = 1;
  for (const index_t n : shape) {
    wanted *= as_size(n);
  }
  if (x.size() == wanted && (wanted == 0 || x.data() != nullptr)) [[likely]] {
    return;
  }
  std::string axes;
  for (const index_t n : shape) {
    axes += (axes.empty() ? "" : ", ") + std::to_string(n);
  }
  expects(false, call, ": expected ", what, " [", axes, "] (", wanted, " numbers), got ",
          x.size() == wanted ? "null" : std::to_string(x.size()));
}

/// Refuses values where they are in the keys: there they are not given. `dim`: of values.
inline void expect_no_values(const char* call, bool one_memory, index_t dim, const any_span& v) {
  expects(!one_memory || v.size() == 0, call, ": expected no values (they are the first ", dim,
          " numbers of keys), got ", v.size(), " numbers");
}

}  // namespace detail

/// Refuses NaN and Inf, naming the first.
inline void expect_finite(const char* expected, const any_span& x) {
  x.visit([&](auto numbers) {
    expect_finite(expected, numbers.data(), static_cast<std::ptrdiff_t>(numbers.size()));
  });
}

}  // namespace kvmeld::inline v0
