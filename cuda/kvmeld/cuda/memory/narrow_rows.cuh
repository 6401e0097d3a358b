// SPDX-License-Identifier: MIT
/// Rows of a cache whose queries, new tokens and outputs are wider numbers: in q8_0, in fp8.
#pragma once

#include <cstdint>      // std::int8_t, std::uint8_t
#include <cstring>      // std::memcpy
#include <type_traits>  // std::conditional_t, std::is_same_v

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {

/// A byte of a row in q8_0: blocks of 32 numbers, each a code times its block's scale, the numbers
/// of `kvmeld::q8_0` to the bit. A row is the codes of whole blocks, 0 after the dim, then the half
/// scales of these: `row_elements` bytes, as many as on the CPU, where each scale lies before its
/// codes and these are never at multiples of 16 bytes. `Number`: what queries, new tokens and
/// outputs are in.
template <class Number>
struct q8_0 {
  std::int8_t code;
};
inline constexpr index_t block_numbers = 32;

/// A number in fp8: e4m3 without infinities (Micikevicius et al. 2022), NaN beyond 448. An engine's
/// scale of keys belongs in its queries, that of values in its outputs; new tokens are divided by
/// theirs.
template <class Number>
struct fp8_e4m3 {
  std::uint8_t bits;
};

namespace detail {

template <class Scalar>
struct row_format {
  using number = Scalar;
  static constexpr bool blocks = false, fp8 = false;
};
template <class Number>
struct row_format<q8_0<Number>> {
  using number = Number;
  static constexpr bool blocks = true, fp8 = false;
};
template <class Number>
struct row_format<fp8_e4m3<Number>> {
  using number = Number;
  static constexpr bool blocks = false, fp8 = true;
};

}  // namespace detail

/// What queries, new tokens and outputs of a cache are in.
template <class Scalar>
using row_number = typename detail::row_format<Scalar>::number;
/// Do 32 numbers of a row share a scale?
template <class Scalar>
inline constexpr bool in_blocks = detail::row_format<Scalar>::blocks;
/// Are rows narrower than those numbers, so that a new token is rounded?
template <class Scalar>
inline constexpr bool narrow_rows = !std::is_same_v<Scalar, row_number<Scalar>>;

template <class Number>
KVMELD_HD float to_float(fp8_e4m3<Number> x) {
  return fp8_to_float(x.bits);
}
template <class Scalar>
requires(detail::row_format<Scalar>::fp8) KVMELD_HD Scalar from_float(float x) {
  return {fp8_from_float(x)};
}

/// What rows are multiplied in where they are compared: every number of theirs is one of these. A
/// code times its scale has 18 bits: a half would round 7 of them away, and of keys whose cosines
/// are within 1e-3 another could be the nearest than on the CPU. An fp8 has 4.
template <class Scalar>
using product_number =
    std::conditional_t<in_blocks<Scalar>, float,
                       std::conditional_t<detail::row_format<Scalar>::fp8, half, Scalar>>;

/// Numbers that a row of `dim` has room for, and elements of memory that it takes.
template <class Scalar>
KVMELD_HD index_t padded(index_t dim) {
  return in_blocks<Scalar> ? (dim + block_numbers - 1) / block_numbers * block_numbers : dim;
}
template <class Scalar>
KVMELD_HD index_t row_elements(index_t dim) {
  return padded<Scalar>(dim) + (in_blocks<Scalar> ? padded<Scalar>(dim) / block_numbers * 2 : 0);
}

/// Elements `i ...` of a row `[dim]`, 16 bytes of them; zeros beyond its end. In one access where
/// rows are aligned, which only a ragged end is not.
template <class Scalar>
KVMELD_DEVICE vector_16<Scalar> load_row(const Scalar* row, index_t i, index_t dim, bool aligned) {
  vector_16<Scalar> x;
  vector_16<unsigned> words;  // what both ways meet in: halves would be taken apart where they are
  if (aligned && i + vector_16<Scalar>::size <= dim) {  // loaded, and each load waited for
    words = load_words(row + i);
  } else {
    KVMELD_UNROLL
    for (index_t j = 0; j < vector_16<Scalar>::size; ++j) {
      x[j] = i + j < dim ? row[i + j] : Scalar{};
    }
    std::memcpy(static_cast<void*>(&words), &x, sizeof x);
  }
  std::memcpy(static_cast<void*>(&x), &words, sizeof x);
  return x;
}

template <class Scalar>
KVMELD_DEVICE void store_row(Scalar* row, index_t i, index_t dim, bool aligned,
                             const vector_16<Scalar>& x) {
  if (aligned && i + vector_16<Scalar>::size <= dim) {
    store_16(row + i, x);
    return;
  }
  KVMELD_UNROLL
  for (index_t j = 0; j < vector_16<Scalar>::size; ++j) {
    if (i + j < dim) {
      row[i + j] = x[j];
    }
  }
}

/// 16 numbers of a narrow row, of q8_0 half a block. Four codes a word: taken apart, each would
/// have a register.
template <class Scalar>
struct coded_numbers {
  static constexpr index_t size = 16;
  vector_16<unsigned> codes = {};
  float scale = 0;  // of q8_0

  KVMELD_DEVICE float operator[](index_t i) const {
    const unsigned code = codes[i / 4] >> i % 4 * 8 & 0xffU;
    if constexpr (in_blocks<Scalar>) {
      return scale * static_cast<float>(static_cast<std::int8_t>(code));
    } else {
      return fp8_to_float(static_cast<std::uint8_t>(code));
    }
  }
  KVMELD_DEVICE void add_code(index_t i, index_t code) {
    codes[i / 4] |= (static_cast<unsigned>(code) & 0xffU) << i % 4 * 8;
  }
};

template <class Scalar>
requires(narrow_rows<Scalar>) KVMELD_DEVICE coded_numbers<Scalar> load_row(const Scalar* row,
                                                                           index_t i, index_t dim,
                                                                           bool aligned) {
  coded_numbers<Scalar> x;
  if (i < dim) {
    const index_t end = padded<Scalar>(dim);
    const auto codes = load_row(reinterpret_cast<const std::int8_t*>(row), i, end, aligned);
    std::memcpy(static_cast<void*>(&x.codes), &codes, sizeof codes);
    if constexpr (in_blocks<Scalar>) {
      x.scale = to_float(reinterpret_cast<const half*>(row + end)[i / block_numbers]);
    }
  }
  return x;
}
/// Numbers `i ...` of a narrow row `[dim]`, as many as 16 bytes of `Number` hold; zeros beyond its
/// end.
template <class Number, class Scalar>
KVMELD_DEVICE vector_16<Number> load_as(const Scalar* row, index_t i, index_t dim, bool aligned) {
  constexpr index_t width = vector_16<Number>::size, words = width / 4;
  const index_t first = i % coded_numbers<Scalar>::size;
  const auto x = load_row(row, i - first, dim, aligned);
  coded_numbers<Scalar> own;
  own.scale = x.scale;
  unrolled<coded_numbers<Scalar>::size / width, words>([&](index_t k, index_t w) {
    own.codes[w] = first == k * width ? x.codes[k * words + w] : own.codes[w];
  });
  vector_16<Number> y;
  unrolled<width>([&](index_t j) { y[j] = from_float<Number>(own[j]); });
  return y;
}

/// Number `i` of a row `[dim]`.
template <class Scalar>
KVMELD_DEVICE float load_number(const Scalar* row, index_t i, index_t dim) {
  if constexpr (in_blocks<Scalar>) {
    const auto* const scales = reinterpret_cast<const half*>(row + padded<Scalar>(dim));
    return to_float(scales[i / block_numbers]) * static_cast<float>(row[i].code);
  } else {
    return to_float(row[i]);
  }
}

template <class Scalar>
KVMELD_DEVICE void store_row(Scalar* row, index_t i, index_t dim, bool aligned,
                             const coded_numbers<Scalar>& x) {
  const index_t end = padded<Scalar>(dim);
  vector_16<std::int8_t> codes;
  std::memcpy(static_cast<void*>(&codes), &x.codes, sizeof codes);
  store_row(reinterpret_cast<std::int8_t*>(row), i, end, aligned, codes);
  if constexpr (in_blocks<Scalar>) {
    if (i < end && i % block_numbers == 0) {
      reinterpret_cast<half*>(row + end)[i / block_numbers] = from_float<half>(x.scale);
    }
  }
}

/// What `load_row` gives: 16 bytes of a row, whose numbers are `to_float(x[j])`.
template <class Scalar>
using row_vector =
    decltype(load_row(static_cast<const Scalar*>(nullptr), index_t{}, index_t{}, true));

/// Numbers as rows hold them: rounded to the nearest. Of blocks by whole warps, two lanes side by
/// side a block.
template <class Scalar>
KVMELD_DEVICE row_vector<Scalar> rounded(const float (&x)[vector_16<Scalar>::size]) {
  row_vector<Scalar> y;
  if constexpr (in_blocks<Scalar>) {  // as `kvmeld::q8_0::of`
    unsigned most = 0;                // of magnitudes; Inf and NaN are above all numbers
    KVMELD_UNROLL
    for (index_t j = 0; j < y.size; ++j) {
      unsigned bits = 0;
      std::memcpy(&bits, &x[j], sizeof bits);
      bits &= 0x7fffffffU;
      most = bits > most ? bits : most;
    }
    most = reduce_max(most, 2);
    float largest = 0;
    std::memcpy(&largest, &most, sizeof most);
    const float scale = to_float(from_float<half>(largest / 127.0F));
    const bool finite = scale - scale == 0;
    y.scale = finite ? scale : scale - scale;
    KVMELD_UNROLL
    for (index_t j = 0; j < y.size; ++j) {
      const float ratio = finite && scale != 0 ? x[j] / scale : 0.0F;
      const auto whole = static_cast<index_t>(ratio);
      const float rest = ratio - static_cast<float>(whole);
      index_t code = whole + (rest >= 0.5F ? 1 : 0) - (rest <= -0.5F ? 1 : 0);
      code = code > 127 ? 127 : code < -127 ? -127 : code;
      y.add_code(j, code);
    }
  } else if constexpr (narrow_rows<Scalar>) {
    KVMELD_UNROLL
    for (index_t j = 0; j < y.size; ++j) {
      y.add_code(j, fp8_from_float(x[j]));
    }
  } else {
    KVMELD_UNROLL
    for (index_t j = 0; j < y.size; ++j) {
      y[j] = from_float<Scalar>(x[j]);
    }
  }
  return y;
}

}  // namespace kvmeld::cuda
