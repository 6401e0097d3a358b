// SPDX-License-Identifier: MIT
/// Pieces of one block of floats: scratch that is allocated once.
#pragma once

#include <algorithm>  // std::max
#include <memory>     // std::align
#include <utility>    // std::exchange
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/detail/product.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// Hands out parts of `floats`, which grows to `size` at its first use only. What was handed out by
/// another arena on the same floats is overwritten. Every part begins at a multiple of
/// `vector_bytes`: the same inputs must give the same bytes wherever the block lies.
class arena {
 public:
  arena(std::vector<float>& floats, std::size_t size) {
    const std::size_t needed = size + (max_parts + 1) * line;
    floats.resize(std::max(floats.size(), needed));
    void* begin = floats.data();
    std::size_t room = floats.size() * sizeof(float);
    next_ =
        static_cast<float*>(std::align(line * sizeof(float), size * sizeof(float), begin, room));
  }
  Eigen::Map<Eigen::VectorXf> column(index_t n) { return {take(n), n}; }
  Eigen::Map<dense::matrix_of<float>> rows(index_t n, index_t dim) {
    return {take(std::ptrdiff_t{n} * dim), n, dim};
  }

 private:
  static constexpr std::size_t line = vector_bytes / sizeof(float), max_parts = 16;

  float* take(std::ptrdiff_t n) {
    constexpr std::ptrdiff_t whole = line;
    return std::exchange(next_, next_ + (n + whole - 1) / whole * whole);
  }
  float* next_;
};

}  // namespace detail
}  // namespace kvmeld::inline v0
