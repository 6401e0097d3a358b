// SPDX-License-Identifier: MIT
/// What a ridge is solved in, for tests: of heads with any numbers of unknowns.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/merge/ridge.cuh"

namespace kvmeld::cuda {

/// Unknown `u` is of row `2 u + 1`.
class ridge_memory {
  static constexpr index_t parts = 3;
  index_t heads_, halves_, most_, dim_, queries_;

 public:
  index_t capacity;
  device_buffer<unsigned char> memory;
  device_buffer<index_t> unknowns, row;
  device_buffer<float> missing, squares, largest, out;
  detail::ridge_system system;

  ridge_memory(const std::vector<index_t>& of, index_t dim, index_t queries, index_t halves)
      : heads_(static_cast<index_t>(of.size())),
        halves_(halves),
        most_(*std::max_element(of.begin(), of.end())),
        dim_(dim),
        queries_(queries),
        capacity(2 * most_ + 1),
        memory(allocated({}).bytes),
        unknowns(of),
        row(size(heads_ * capacity), 0),
        missing(size(heads_ * queries * dim), 0),
        squares(size(heads_ * parts), 0),
        largest(squares.size(), 0),
        out(std::vector(size(heads_ * capacity * dim), 7.0F)),
        system(allocated({memory.data(), memory.size()}).system) {
    system.unknowns = unknowns.data();
    for (index_t h = 0; h < heads_; ++h) {
      for (index_t u = 0; u < of[static_cast<std::size_t>(h)]; ++u) {
        row[h * capacity + u] = 2 * u + 1;
      }
    }
  }

  /// The probability of unknown `u` for query `q`, as the system's halfs have it then.
  double put(index_t h, index_t u, index_t q, double x) {
    const auto split =
        detail::split_number::of(static_cast<float>(x) * detail::ridge_system::p_scale);
    double kept = to_float(split.high);
    write(system.row(h, u) + q, split.high);
    if (halves_ == 2) {
      write(system.row(h, u) + q + system.low(), split.low);
      kept += to_float(split.low);
    }
    squares[h * parts + q % parts] += static_cast<float>(x * x);
    return kept / detail::ridge_system::p_scale;
  }
  /// What is lacking of an output.
  void put_missing(index_t h, index_t q, index_t i, float x) {
    missing[(h * queries_ + q) * dim_ + i] = x;
    float& most = largest[h * parts + q % parts];
    most = std::max(most, x < 0 ? -x : x);
  }

  void solve(float ridge, stream stream) {
    const detail::ridge_outputs outputs{missing.data(), squares.data(), largest.data(), parts,
                                        row.data(),     capacity,       out.data()};
    const auto blocks = static_cast<unsigned>(heads_);
    halves_ == 1 ? detail::solve_ridge<1>(system, outputs, ridge, blocks, stream)
                 : detail::solve_ridge<2>(system, outputs, ridge, blocks, stream);
  }
  bool intact() const { return memory.intact() && out.intact() && missing.intact(); }

 private:
  struct room {
    detail::ridge_system system;
    std::size_t bytes;
  };
  room allocated(workspace of) const {
    workspace_allocator from(of);
    const auto s = detail::allocate_ridge(from, size(heads_), most_, dim_, queries_, halves_, 0);
    return {s, from.used()};
  }
  static std::size_t size(index_t n) { return static_cast<std::size_t>(n); }
  void write(const half* at, half x) {
    const auto* const to = reinterpret_cast<const unsigned char*>(at);
    std::memcpy(memory.host() + (to - memory.data()), &x, sizeof x);
  }
};

}  // namespace kvmeld::cuda
