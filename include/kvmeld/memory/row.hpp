// SPDX-License-Identifier: MIT
/// One key or one value, in whatever storage: floats, numbers in 16 bits, or blocks of 8 or 4.
#pragma once

#include <Eigen/Core>  // Eigen::half
#include <algorithm>   // std::min, std::transform
#include <cmath>       // std::sqrt
#include <concepts>    // std::same_as
#include <span>
#include <utility>  // std::declval

#include "kvmeld/config.hpp"
#include "kvmeld/memory/blocks.hpp"

namespace kvmeld::inline v0 {

/// Numbers as engines hand them in: queries, new keys and values.
template <class T>
concept plain_scalar =
    std::same_as<T, float> || std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

/// What keys and values are stored as: a number each, or blocks of them. Arithmetic is done in
/// float whatever the storage.
template <class T>
concept block_scalar = std::same_as<T, q8_0> || std::same_as<T, q4_0>;
template <class T>
concept storage_scalar = plain_scalar<T> || block_scalar<T>;
static_assert(q8_0::size == q4_0::size);

/// `Scalar`s that a row of `dim` numbers takes: blocks are whole, the last one filled with zeros.
template <class Scalar>
constexpr index_t row_size(index_t dim) {
  return block_scalar<Scalar> ? (dim + q8_0::size - 1) / q8_0::size : dim;
}

namespace detail {

/// What a contiguous range has, as `std::span` takes it.
template <class R>
using element_of = typename decltype(std::span(std::declval<R&>()))::value_type;

}  // namespace detail

/// One key or one value: `dim` elements, `step` apart.
template <class Scalar>
struct row {
  Scalar* data;
  std::ptrdiff_t step = 1;

  constexpr Scalar& operator[](index_t i) const { return data[i * step]; }
  /// From element `i` on.
  constexpr row from(index_t i) const { return {data + i * step, step}; }
};

/// A row in blocks, side by side: `step` is 1. Read number by number, written whole (`store_row`).
template <block_scalar Block>
struct row<Block> {
  Block* data;
  std::ptrdiff_t step = 1;

  float operator[](index_t i) const { return data[i / Block::size][i % Block::size]; }
  /// From number `i` on, a multiple of `Block::size`.
  row from(index_t i) const { return {data + i / Block::size, step}; }
};

/// The scalar of rows that say at run time what theirs is.
struct any_scalar {};

/// What keys and values are held as: floats, numbers in 16 bits, or blocks of 8 or 4. As saved
/// caches number them. Values in `q4_0` are rotated (`hadamard`), keys are not.
enum class storage : std::uint8_t { f32, f16, bf16, q8_0, q4_0 };

/// What keys are held as, and values: one storage says it of both.
struct storage_pair {
  storage keys, values;

  constexpr storage_pair(storage both) : keys(both), values(both) {}  // NOLINT: it is one
  constexpr storage_pair(storage of_keys, storage of_values) : keys(of_keys), values(of_values) {}

  friend bool operator==(const storage_pair&, const storage_pair&) = default;
};

template <storage_scalar Scalar>
inline constexpr storage storage_of = std::same_as<Scalar, float>             ? storage::f32
                                      : std::same_as<Scalar, Eigen::half>     ? storage::f16
                                      : std::same_as<Scalar, Eigen::bfloat16> ? storage::bf16
                                      : std::same_as<Scalar, q8_0>            ? storage::q8_0
                                                                              : storage::q4_0;

/// Bytes of one element: a number, or a block of numbers.
constexpr std::size_t element_bytes(storage type) {
  return type == storage::f32    ? sizeof(float)
         : type == storage::q8_0 ? sizeof(q8_0)
         : type == storage::q4_0 ? sizeof(q4_0)
                                 : 2;
}
/// Numbers in one element.
constexpr index_t numbers_of(storage type) { return type >= storage::q8_0 ? q8_0::size : 1; }
/// Elements of a row of `dim` numbers.
constexpr index_t row_size(storage type, index_t dim) {
  return numbers_of(type) > 1 ? row_size<q8_0>(dim) : dim;
}
/// Bytes of a row of `dim` numbers.
constexpr std::size_t row_bytes(storage type, index_t dim) {
  return as_size(row_size(type, dim)) * element_bytes(type);
}

/// A row of any scalar, so that what reads rows is compiled once for all.
template <>
struct row<any_scalar> {
  std::byte* data;
  std::ptrdiff_t step;  ///< in bytes
  storage type;

  row from(index_t i) const {
    return {data + (numbers_of(type) > 1 ? i / q8_0::size : i) * step, step, type};
  }

  /// Calls `f` with the row as what it is.
  template <class F>
  decltype(auto) visit(F&& f) const {
    switch (type) {
      case storage::f32:
        return f(as<float>());
      case storage::f16:
        return f(as<Eigen::half>());
      case storage::bf16:
        return f(as<Eigen::bfloat16>());
      case storage::q8_0:
        return f(as<q8_0>());
      default:
        return f(as<q4_0>());
    }
  }

  /// Reads one element. Whole rows are read faster by `to_floats`.
  float operator[](index_t i) const {
    return visit([&](auto x) { return static_cast<float>(x[i]); });
  }

  /// The row as one of `Scalar`, which it must be.
  template <storage_scalar Scalar>
  row<Scalar> as() const {
    return {reinterpret_cast<Scalar*>(data), step / std::ptrdiff_t{sizeof(Scalar)}};
  }
};

namespace detail {

/// Writes `from [dim]`; contiguous rows, the usual ones, at the width of a vector.
template <class T, plain_scalar Scalar>
void store_row(const T* from, row<Scalar> to, index_t dim) {
  const auto convert = [](T x) { return static_cast<Scalar>(x); };
  if (to.step == 1) {
    std::transform(from, from + dim, to.data, convert);
  } else {
    for (index_t i = 0; i < dim; ++i) {
      to[i] = convert(from[i]);
    }
  }
}

/// ... a last block that `dim` does not fill is filled with zeros.
template <class T, block_scalar Block>
void store_row(const T* from, row<Block> to, index_t dim) {
  for (index_t begin = 0; begin < dim; begin += Block::size) {
    float x[Block::size];
    const index_t count = std::min(Block::size, dim - begin);
    std::transform(from + begin, from + begin + count, x,
                   [](T e) { return static_cast<float>(e); });
    std::fill(x + count, x + Block::size, 0.0F);
    to.data[begin / Block::size] = Block::of(x);
  }
}

template <class T>
void store_row(const T* from, row<any_scalar> to, index_t dim) {
  to.visit([&](auto x) { store_row(from, x, dim); });
}

/// Both of one scalar; contiguous rows, the usual ones, at once.
inline void copy_row(row<any_scalar> to, row<any_scalar> from, index_t dim) {
  const auto size = static_cast<std::ptrdiff_t>(element_bytes(to.type));
  if (to.step == size && from.step == size) {
    std::copy_n(from.data, row_bytes(to.type, dim), to.data);
    return;
  }
  to.visit([&]<class Scalar>(row<Scalar> x) {
    for (index_t i = 0; i < row_size<Scalar>(dim); ++i) {
      x.data[i * x.step] = from.as<Scalar>().data[i * from.as<Scalar>().step];
    }
  });
}

/// The row's elements where they are contiguous floats, null where they are not.
template <class Scalar>
const float* floats_in(row<Scalar> x) {
  if constexpr (std::same_as<std::remove_const_t<Scalar>, float>) {
    return x.step == 1 ? x.data : nullptr;
  } else {
    return nullptr;
  }
}
inline const float* floats_in(row<any_scalar> x) {
  return x.type == storage::f32 && x.step == sizeof(float) ? reinterpret_cast<const float*>(x.data)
                                                           : nullptr;
}

/// The rotation of values in 4 bits, so that no number of a row stands out, as a block's scale
/// wants it: `x [dim]` times the normalised Hadamard matrix (Sylvester's) of the largest power of
/// two that divides `dim`, block by block, in place. Orthogonal and its own inverse. An odd dim:
/// unchanged.
inline void hadamard(float* x, index_t dim) {
  const index_t size = dim & -dim;
  const float norm = 1 / std::sqrt(static_cast<float>(size));
  for (index_t half = 1; half < size; half *= 2) {
    for (index_t begin = 0; begin < dim; begin += 2 * half) {
      for (index_t i = begin; i < begin + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
    }
  }
  for (index_t i = 0; i < dim; ++i) {
    x[i] *= norm;
  }
}

/// Writes `from [dim]` rotated.
template <class T>
KVMELD_NOINLINE void store_rotated(const T* from, row<any_scalar> to, index_t dim) {
  float x[4096];  // the longest row
  std::transform(from, from + dim, x, [](T e) { return static_cast<float>(e); });
  hadamard(x, dim);
  store_row(x, to, dim);
}

}  // namespace detail

}  // namespace kvmeld::inline v0
