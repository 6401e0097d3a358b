// SPDX-License-Identifier: MIT
/// One key or one value, in whatever storage: floats, numbers in 16 bits, or blocks of 8, 6 or 4.
#pragma once

#include <Eigen/Core>  // Eigen::half
#include <algorithm>   // std::min, std::max, std::transform
#include <bit>         // std::bit_cast
#include <cmath>       // std::isfinite, std::sqrt
#include <concepts>    // std::same_as
#include <limits>      // std::numeric_limits
#include <span>
#include <utility>  // std::declval

#include "kvmeld/config.hpp"
#include "kvmeld/detail/arithmetic.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// IEEE binary16. Without branches, so that compilers take many at a time (Eigen 3.4 takes one, by
/// instructions that it finds with clang only). No step makes a denormal float: a process that
/// flushes these to 0 (FTZ, DAZ), as one linked with -ffast-math does, gets the same numbers.
inline float half_bits_to_float(std::uint16_t half) {
  constexpr std::int32_t one = 1 << 23, raise = 224 * one;  // NaN and Inf as a float has them
  const std::int32_t shifted = (half & 0x7FFF) << 13;
  // A denormal half is the fraction after a leading 1 that is subtracted again.
  const std::int32_t is_denormal = shifted < one ? -1 : 0;
  const float raised = std::bit_cast<float>(shifted + raise + (is_denormal & one)) -
                       std::bit_cast<float>(is_denormal & (raise + one));
  const auto magnitude = std::bit_cast<std::uint32_t>(raised * 0x1p-112F);
  return std::bit_cast<float>(magnitude | (half & 0x8000U) << 16);
}

/// `codes [n]` of `x [n]`, 0 to `2 half − 1`, each a number's quotient by the scale, which is
/// returned, and `half`. The largest magnitude has code 0. NaN, Inf or a scale that a half does not
/// hold: the scale is NaN.
template <int half>
Eigen::half round_to_codes(const float* x, index_t n, std::uint8_t* codes) {
  constexpr std::uint32_t magnitude = 0x7fffffffU;
  std::uint32_t most = 0;  // magnitudes order as their bits do, Inf and NaN above all numbers
  for (index_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(x[i]);
    most = (bits & magnitude) > (most & magnitude) ? bits : most;
  }
  const float scale = std::bit_cast<float>(most) / -half;
  const auto stored = static_cast<Eigen::half>(scale);
  const float held = half_bits_to_float(stored.x);
  if (!std::isfinite(held)) {
    std::fill_n(codes, n, std::uint8_t{0});
    return std::numeric_limits<Eigen::half>::quiet_NaN();
  }
  // By the scale before it is rounded: the largest magnitude has code 0, and a block that is
  // stored again stays as it is. The sum is above 0, where a conversion rounds down.
  for (index_t i = 0; i < n; ++i) {
    const int code = held == 0 ? half : static_cast<int>(x[i] / scale + (half + 0.5F));
    codes[i] = static_cast<std::uint8_t>(std::min(code, 2 * half - 1));
  }
  return held == 0 ? Eigen::half{} : stored;  // without a sign
}

}  // namespace detail

/// 32 numbers: number `i` is `codes[i] · scale`. Symmetric: the scale is the largest magnitude
/// divided by 127, in half, so a number is off by half a scale (and the scale by its rounding).
/// Bit for bit what ggml calls `block_q8_0`: rows of a cache in `GGML_TYPE_Q8_0` are read in place.
/// A block has no code for NaN and Inf, nor for numbers beyond 8.3 million: with one it is NaN
/// whole.
struct q8_0 {
  static constexpr index_t size = 32;  ///< numbers of a block

  Eigen::half scale = {};        ///< of all codes
  std::int8_t codes[size] = {};  ///< −127 to 127

  int code(index_t i) const { return codes[i]; }  ///< of number `i`
  /// Number `i`.
  float operator[](index_t i) const { return static_cast<float>(code(i)) * scale_as_float(); }
  float scale_as_float() const { return detail::half_bits_to_float(scale.x); }  ///< the scale
  /// All of them, `x [size]`.
  EIGEN_STRONG_INLINE void to_floats(float* x) const {
    const float by = scale_as_float();
    for (index_t i = 0; i < size; ++i) {
      x[i] = by * static_cast<float>(codes[i]);
    }
  }

  /// Of `x [size]`.
  static q8_0 of(const float* x) {
    q8_0 block;
    block.scale = static_cast<Eigen::half>(detail::largest_magnitude(x, size) / 127.0F);
    const float scale = block.scale_as_float();
    if (!std::isfinite(scale)) {
      block.scale = std::numeric_limits<Eigen::half>::quiet_NaN();
      return block;
    }
    if (scale == 0) {
      return block;
    }
    // By division: the inverse of a tiny scale would be infinite.
    for (index_t i = 0; i < size; ++i) {
      // To the nearest, halves away from zero: std::lround is not compiled to vectors. Below 256:
      // the least scale that is not 0 is at least two thirds of what it was rounded from.
      const float ratio = x[i] / scale;
      const auto whole = static_cast<int>(ratio);
      const float rest = ratio - static_cast<float>(whole);
      const int code = whole + (rest >= 0.5F ? 1 : 0) - (rest <= -0.5F ? 1 : 0);
      block.codes[i] = static_cast<std::int8_t>(std::min(std::max(code, -127), 127));
    }
    return block;
  }
};

static_assert(sizeof(q8_0) == 34);

/// 32 numbers: number `i` is `(code_i − 8) · scale`, codes 0 to 15. The largest magnitude has code
/// 0, so the scale is that number divided by −8, in half: a number is off by half a scale, one at
/// the other end by a scale (and the scale by its rounding). As ggml's `block_q4_0` lies. NaN and
/// Inf, or a number beyond 524 thousand, make the block NaN whole. Of values, what lies in the
/// blocks is rotated: rows that an engine has not rotated are not read as they are.
struct q4_0 {
  static constexpr index_t size = 32;  ///< numbers of a block

  Eigen::half scale = {};             ///< of all codes
  std::uint8_t codes[size / 2] = {};  ///< numbers `i` (lower 4 bits) and `i + 16`

  /// Of number `i`, −8 to 7.
  int code(index_t i) const { return (codes[i % (size / 2)] >> (i < size / 2 ? 0 : 4) & 15) - 8; }
  /// Number `i`.
  float operator[](index_t i) const { return static_cast<float>(code(i)) * scale_as_float(); }
  float scale_as_float() const { return detail::half_bits_to_float(scale.x); }  ///< the scale
  /// All of them, `x [size]`.
  EIGEN_STRONG_INLINE void to_floats(float* x) const {
    const float by = scale_as_float();
    for (index_t i = 0; i < size / 2; ++i) {
      x[i] = number(codes[i], by), x[i + size / 2] = number(codes[i] >> 4, by);
    }
  }
  /// The number of the code in the lower 4 bits.
  static float number(int code, float scale) { return scale * static_cast<float>((code & 15) - 8); }

  /// Of `x [size]`.
  static q4_0 of(const float* x) {
    q4_0 block;
    std::uint8_t all[size];
    block.scale = detail::round_to_codes<8>(x, size, all);
    for (index_t i = 0; i < size / 2; ++i) {
      block.codes[i] = static_cast<std::uint8_t>(all[i] | all[i + size / 2] << 4);
    }
    return block;
  }
};

static_assert(sizeof(q4_0) == 18);

/// 32 numbers: number `i` is `(code_i − 32) · scale`, codes 0 to 63, rounded as those of `q4_0`.
struct q6_0 {
  static constexpr index_t size = 32;  ///< numbers of a block

  Eigen::half scale = {};             ///< of all codes
  std::uint8_t codes[size / 2] = {};  ///< lower 4 bits, as of `q4_0`
  std::uint8_t upper[size / 4] = {};  ///< upper 2 bits of numbers `i` (lowest), `i + 8`, ...

  /// Of number `i`, −32 to 31.
  int code(index_t i) const {
    const int low = codes[i % (size / 2)] >> (i < size / 2 ? 0 : 4) & 15;
    return (low | (upper[i % 8] >> (i / 8 * 2) & 3) << 4) - 32;
  }
  /// Number `i`.
  float operator[](index_t i) const { return static_cast<float>(code(i)) * scale_as_float(); }
  float scale_as_float() const { return detail::half_bits_to_float(scale.x); }  ///< the scale
  /// All of them, `x [size]`.
  EIGEN_STRONG_INLINE void to_floats(float* x) const {
    const float by = scale_as_float();
    for (index_t i = 0; i < size; ++i) {
      x[i] = by * static_cast<float>(code(i));
    }
  }

  /// Of `x [size]`.
  static q6_0 of(const float* x) {
    q6_0 block;
    std::uint8_t all[size];
    block.scale = detail::round_to_codes<32>(x, size, all);
    for (index_t i = 0; i < size; ++i) {
      block.codes[i % (size / 2)] |=
          static_cast<std::uint8_t>((all[i] & 15) << (i < size / 2 ? 0 : 4));
      block.upper[i % 8] |= static_cast<std::uint8_t>(all[i] >> 4 << (i / 8 * 2));
    }
    return block;
  }
};

static_assert(sizeof(q6_0) == 26);

/// Numbers as engines hand them in: queries, new keys and values.
template <class T>
concept plain_scalar =
    std::same_as<T, float> || std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

/// What keys and values are stored as: a number each, or blocks of them. Arithmetic is done in
/// float whatever the storage.
template <class T>
concept block_scalar = std::same_as<T, q8_0> || std::same_as<T, q4_0> || std::same_as<T, q6_0>;
/// What rows may be of.
template <class T>
concept storage_scalar = plain_scalar<T> || block_scalar<T>;
static_assert(q8_0::size == q4_0::size && q8_0::size == q6_0::size);

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
  Scalar* data;             ///< the first element
  std::ptrdiff_t step = 1;  ///< elements, one to the next

  constexpr Scalar& operator[](index_t i) const { return data[i * step]; }  ///< element `i`
  /// From element `i` on.
  constexpr row from(index_t i) const { return {data + i * step, step}; }
};

/// A row in blocks, side by side: `step` is 1. Read number by number, written whole (`store_row`).
template <block_scalar Block>
struct row<Block> {
  Block* data;              ///< the first block
  std::ptrdiff_t step = 1;  ///< always 1

  /// Number `i`.
  float operator[](index_t i) const { return data[i / Block::size][i % Block::size]; }
  /// From number `i` on, a multiple of `Block::size`.
  row from(index_t i) const { return {data + i / Block::size, step}; }
};

/// The scalar of rows that say at run time what theirs is.
struct any_scalar {};

/// What keys and values are held as: floats, numbers in 16 bits, or blocks of 8, 6 or 4. As saved
/// caches number them. Values in `q4_0` and `q6_0` are rotated (`hadamard`), keys are not.
///
/// `k8`, `k6`, `k4` are for the keys of a `cache`: blocks of `q8_0`, `q6_0`, `q4_0` of the key less
/// the mean of its head's keys, rotated. The mean, in half, is of the keys that the head has been
/// given when it first rounds one, but for the first tokens', and stays while a key is held less
/// it. Some models' keys have a large number that is nearly the same at every token (Qwen 2.5: 211
/// beside a median of .76), which no block's scale suits. Without `newest` rows in half the first
/// call decides it: better a prompt than a token. Rotated numbers are up to the square root of the
/// power of two in the dim times as large: blocks are NaN beyond that part of what theirs hold.
enum class storage : std::uint8_t { f32, f16, bf16, q8_0, q4_0, q6_0, k8, k6, k4 };

/// Are rows held less their head's mean?
constexpr bool is_centred(storage type) { return type >= storage::k8; }
/// What they lie in memory as.
constexpr storage lies_as(storage type) {
  return type == storage::k8   ? storage::q8_0
         : type == storage::k6 ? storage::q6_0
         : type == storage::k4 ? storage::q4_0
                               : type;
}

/// Tokens at the beginning whose rows stay in half where the newest do: attention's sinks, which
/// are unlike all others.
inline constexpr index_t first_in_half = 4;

/// Rows in half that a head may have, at most.
inline constexpr index_t most_newest = 64;

/// What keys are held as, and values: one storage says it of both. Of rows in blocks the `newest`
/// of each head are held in half, and are rounded to blocks once, when as many newer ones are
/// there; where there are any, the first four are too, and stay so.
struct storage_pair {
  storage keys, values;  ///< may differ
  index_t newest = 0;    ///< rows in half per head, 0 to 64

  /// Keys and values alike.
  constexpr storage_pair(storage both) : keys(both), values(both) {}  // NOLINT: it is one
  /// Each its own; `newest` rows of a head in half.
  constexpr storage_pair(storage of_keys, storage of_values, index_t of_newest = 0)
      : keys(of_keys), values(of_values), newest(of_newest) {}

  /// This. Refused: values in a storage of keys, `newest` beyond 0 to 64, or where nothing is in
  /// blocks.
  inline storage_pair checked() const;

  friend bool operator==(const storage_pair&, const storage_pair&) = default;
};

/// What rows of `Scalar` are held as.
template <storage_scalar Scalar>
inline constexpr storage storage_of = std::same_as<Scalar, float>             ? storage::f32
                                      : std::same_as<Scalar, Eigen::half>     ? storage::f16
                                      : std::same_as<Scalar, Eigen::bfloat16> ? storage::bf16
                                      : std::same_as<Scalar, q8_0>            ? storage::q8_0
                                      : std::same_as<Scalar, q4_0>            ? storage::q4_0
                                                                              : storage::q6_0;

/// Bytes of one element: a number, or a block of numbers.
constexpr std::size_t element_bytes(storage type) {
  const storage lies = lies_as(type);
  return lies == storage::f32    ? sizeof(float)
         : lies == storage::q8_0 ? sizeof(q8_0)
         : lies == storage::q4_0 ? sizeof(q4_0)
         : lies == storage::q6_0 ? sizeof(q6_0)
                                 : 2;
}
/// Are values held rotated in it, each by `detail::hadamard`?
constexpr bool rotates_values_of(storage type) {
  return type == storage::q4_0 || type == storage::q6_0;
}
/// Numbers in one element.
constexpr index_t numbers_of(storage type) { return type >= storage::q8_0 ? q8_0::size : 1; }
/// Is it in blocks?
constexpr bool in_blocks(storage type) { return numbers_of(type) > 1; }
storage_pair storage_pair::checked() const {
  expects(!is_centred(values),
          "cache: expected values in a storage of values, got k8, k6 or k4, which are of keys");
  expects(newest >= 0 && newest <= most_newest, "cache: expected 0 to ", most_newest,
          " newest rows in half, got ", newest);
  expects(errc::unsupported, newest == 0 || in_blocks(keys) || in_blocks(values),
          "cache: expected newest rows of keys or values in blocks, got none in blocks");
  return *this;
}
/// Elements of a row of `dim` numbers.
constexpr index_t row_size(storage type, index_t dim) {
  return in_blocks(type) ? row_size<q8_0>(dim) : dim;
}
/// Bytes of a row of `dim` numbers.
constexpr std::size_t row_bytes(storage type, index_t dim) {
  return as_size(row_size(type, dim)) * element_bytes(type);
}
/// Rows in half that a head has place for where so many newest ones are.
constexpr index_t rows_in_half(index_t newest) { return newest > 0 ? newest + first_in_half : 0; }
/// Bytes of a head with `slots` in use: of their rows, of those of the newest tokens in half, and
/// of the mean that keys are held less.
constexpr std::size_t head_bytes(const storage_pair& type, index_t dim, index_t value_dim,
                                 index_t slots) {
  const std::size_t newest = (in_blocks(type.keys) ? row_bytes(storage::f16, dim) : 0) +
                             (in_blocks(type.values) ? row_bytes(storage::f16, value_dim) : 0);
  const std::size_t mean = is_centred(type.keys) && slots > 0 ? row_bytes(storage::f16, dim) : 0;
  return as_size(slots) * (row_bytes(type.keys, dim) + row_bytes(type.values, value_dim)) +
         as_size(std::min(slots, rows_in_half(type.newest))) * newest + mean;
}

template <>
struct row<any_scalar>;

namespace detail {

/// `out [x.dim]`: the whole of a row that is held less its head's mean.
inline void centred_to_floats(const row<any_scalar>& x, float* out);

}  // namespace detail

/// A row of any scalar, so that what reads rows is compiled once for all.
template <>
struct row<any_scalar> {
  std::byte* data;      ///< the first element
  std::ptrdiff_t step;  ///< in bytes
  storage type;         ///< of the elements
  /// Of a row that is held less its head's mean, and read whole. In few bytes: rows are handed on
  /// for every slot.
  /// @{
  std::int16_t dim = 0;
  std::int16_t first = 0;             ///< its number that this begins with
  const Eigen::half* mean = nullptr;  ///< [dim]
  /// @}

  /// From number `i` on: in blocks, a multiple of their size.
  row from(index_t i) const {
    if (is_centred(type)) {
      row rest = *this;
      rest.first = static_cast<std::int16_t>(first + i);
      return rest;
    }
    return {data + (in_blocks(type) ? i / q8_0::size : i) * step, step, type};
  }
  /// What lies in memory.
  row held() const { return {data, step, lies_as(type)}; }

  /// Calls `f` with the row as floats that are read.
  template <class F>
  KVMELD_NOINLINE decltype(auto) visit_centred(F& f) const {
    float whole[longest_row];
    detail::centred_to_floats(*this, whole);
    return f(row<float>{whole + first});
  }
  /// Calls `f` with the row as what it is, or, held less its head's mean, as above.
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
      case storage::q4_0:
        return f(as<q4_0>());
      case storage::q6_0:
        return f(as<q6_0>());
      default:
        return visit_centred(f);
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

/// Writes `from [dim]` less `to`'s mean, rotated. The whole of a row.
template <class T>
KVMELD_NOINLINE void store_centred(const T* from, row<any_scalar> to, index_t dim);

template <class T>
void store_row(const T* from, row<any_scalar> to, index_t dim) {
  if (is_centred(to.type)) [[unlikely]] {
    store_centred(from, to, dim);
  } else {
    to.visit([&](auto x) { store_row(from, x, dim); });
  }
}

/// Both held alike, less one mean; contiguous rows, the usual ones, at once.
inline void copy_row(row<any_scalar> to, row<any_scalar> from, index_t dim) {
  const auto size = static_cast<std::ptrdiff_t>(element_bytes(to.type));
  if (to.step == size && from.step == size) {
    std::copy_n(from.data, row_bytes(to.type, dim), to.data);
    return;
  }
  to.held().visit([&]<class Scalar>(row<Scalar> x) {
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

inline namespace KVMELD_INSTRUCTIONS {

/// Sums and differences of numbers of `x [dim]` that are `half` apart.
inline void sums_and_differences(float* x, index_t dim, index_t half) {
  using eight = Eigen::Array<float, 8, 1>;
  for (index_t begin = 0; begin < dim; begin += 2 * half) {
    float *const a = x + begin, *const b = a + half;
    index_t i = 0;
    for (; i + 8 <= half; i += 8) {
      const eight first = Eigen::Map<eight>(a + i), second = Eigen::Map<eight>(b + i);
      Eigen::Map<eight>(a + i) = first + second, Eigen::Map<eight>(b + i) = first - second;
    }
    for (; i < half; ++i) {
      const float first = a[i], second = b[i];
      a[i] = first + second, b[i] = first - second;
    }
  }
}

/// ... 1, 2 and 4 apart of whole eights.
inline void near_sums_and_differences(float* x, index_t dim) {
  for (index_t begin = 0; begin < dim; begin += 8) {
    float y[8], z[8];
    KVMELD_UNROLL_EARLY
    for (index_t i = 0; i < 8; i += 2) {
      y[i] = x[begin + i] + x[begin + i + 1], y[i + 1] = x[begin + i] - x[begin + i + 1];
    }
    KVMELD_UNROLL_EARLY
    for (index_t i = 0; i < 8; ++i) {
      z[i] = (i & 2) == 0 ? y[i] + y[i + 2] : y[i - 2] - y[i];
    }
    KVMELD_UNROLL_EARLY
    for (index_t i = 0; i < 4; ++i) {
      x[begin + i] = z[i] + z[i + 4], x[begin + i + 4] = z[i] - z[i + 4];
    }
  }
}

/// The rotation of rows in few bits, so that no number of one stands out, as a block's scale wants
/// it: `x [dim]` times the normalised Hadamard matrix (Sylvester's) of the largest power of two
/// that divides `dim`, block by block, in place. Orthogonal and its own inverse. An odd dim:
/// unchanged.
inline void hadamard(float* x, index_t dim) {
  const index_t size = dim & -dim;
  index_t half = 1;
  if (size >= 8) {
    near_sums_and_differences(x, dim);
    half = 8;
  }
  for (; half < size; half *= 2) {
    sums_and_differences(x, dim, half);
  }
  Eigen::Map<Eigen::ArrayXf>(x, dim) *= 1 / std::sqrt(static_cast<float>(size));
}

}  // namespace KVMELD_INSTRUCTIONS

inline void centred_to_floats(const row<any_scalar>& x, float* out) {
  x.held().visit([&](auto typed) {
    for (index_t i = 0; i < x.dim; ++i) {
      out[i] = static_cast<float>(typed[i]);
    }
  });
  hadamard(out, x.dim);
  for (index_t i = 0; i < x.dim; ++i) {
    out[i] += half_bits_to_float(x.mean[i].x);
  }
}

template <class T>
void store_centred(const T* from, row<any_scalar> to, index_t dim) {
  float x[longest_row];
  for (index_t i = 0; i < dim; ++i) {
    x[i] = static_cast<float>(from[i]) - half_bits_to_float(to.mean[i].x);
  }
  hadamard(x, dim);
  store_row(x, to.held(), dim);
}

/// Writes `from [dim]` rotated.
template <class T>
KVMELD_NOINLINE void store_rotated(const T* from, row<any_scalar> to, index_t dim) {
  float x[longest_row];
  std::transform(from, from + dim, x, [](T e) { return static_cast<float>(e); });
  hadamard(x, dim);
  store_row(x, to, dim);
}

}  // namespace detail

}  // namespace kvmeld::inline v0
