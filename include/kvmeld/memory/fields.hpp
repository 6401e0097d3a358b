// SPDX-License-Identifier: MIT
/// A policy's memory of a head as named fields of a type each, for host and device. Without Eigen.
#pragma once

#include <cstddef>  // std::ptrdiff_t
#include <cstring>  // std::memcpy

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// Integers, by their bits. `memory`: of `head_state`, here and below.
struct integer_field {
  std::ptrdiff_t at = 0;  ///< where the first is, in floats

  /// Integer `i`.
  KVMELD_HD index_t get(const float* memory, std::ptrdiff_t i = 0) const {
    index_t x = 0;
    memcpy(&x, memory + at + i, sizeof x);
    return x;
  }
  /// Makes integer `i` `x`.
  KVMELD_HD void set(float* memory, index_t x, std::ptrdiff_t i = 0) const {
    memcpy(memory + at + i, &x, sizeof x);
  }
};

/// Rows of numbers, each from a float on.
struct row_field {
  std::ptrdiff_t at = 0, floats = 1;  ///< where the first is; of a row

  /// Row `i`.
  template <class Float>
  KVMELD_HD Float* row(Float* memory, std::ptrdiff_t i = 0) const {
    return memory + at + i * floats;
  }
};

/// Fields one after another, in floats. A policy declares them as members, in their order:
///
///     struct layout {
///       index_t window, dim;
///       memory_layout all = {};
///       integer_field held = all.i32(), position = all.i32(window);
///       row_field query = all.f32(dim, window);
///     };
struct memory_layout {
  std::ptrdiff_t size = 0;  ///< floats so far

  KVMELD_HD integer_field i32(std::ptrdiff_t n = 1) { return {take(n)}; }  ///< `n` integers
  /// `rows` rows of `width` floats each.
  KVMELD_HD row_field f32(std::ptrdiff_t width = 1, std::ptrdiff_t rows = 1) {
    return {take(width * rows), width};
  }
  /// Of 16 bits, two in a float.
  KVMELD_HD row_field b16(std::ptrdiff_t width, std::ptrdiff_t rows = 1) {
    return f32((width + 1) / 2, rows);
  }

 private:
  KVMELD_HD std::ptrdiff_t take(std::ptrdiff_t n) {
    const std::ptrdiff_t at = size;
    size += n;
    return at;
  }
};

}  // namespace kvmeld::inline v0
