// SPDX-License-Identifier: MIT
/// A cache on the card with random contents, and the prompt that filled it.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "card.cuh"
#include "kvmeld/cuda/state.cuh"
#include "kvmeld/memory/attention_spec.hpp"

namespace card {

/// Normal numbers, the first million of them over and over.
inline std::vector<bfloat16> normal(std::size_t n) {
  static std::mt19937 random(1);
  std::normal_distribution<float> number;
  std::vector<bfloat16> x(std::min(n, std::size_t{1} << 20));
  for (bfloat16& y : x) {
    y = __float2bfloat16(number(random));
  }
  const std::size_t period = x.size();
  x.resize(n);
  for (std::size_t i = period; i < n; ++i) {
    x[i] = x[i - period];
  }
  return x;
}

struct cache_shape {
  index_t heads, length, capacity, dim = 128, group = 4;
  index_t spare = 0;  ///< behind the capacity, in arrays of `cache_view`
};

/// A cache, its policy's state and a step's tokens.
struct cache_on_device {
  cache_shape shape;
  std::vector<index_t> lengths;
  buffer<bfloat16> keys, values, q, k, v, out;
  buffer<float> log_mass;
  buffer<char> memory;  // of the state
  cuda::state_view state_of_policy;
  buffer<index_t> position, length, next_position;
  attention_spec spec;

  explicit cache_on_device(const cache_shape& s)
      : shape(s),
        lengths(static_cast<std::size_t>(s.heads), s.length),
        keys(normal(slots() * n(s.dim))),
        values(normal(slots() * n(s.dim))),
        q(normal(n(s.heads * s.group * s.dim))),
        k(normal(n(s.heads * s.dim))),
        v(normal(n(s.heads * s.dim))),
        out(n(s.heads * s.group * s.dim)),
        log_mass(numbers()),
        memory(1),
        position(numbers()),
        length(lengths),
        next_position(lengths),
        spec(attention_spec{
            .kv_heads = s.heads, .group = s.group, .key_dim = s.dim, .rope = rotary::halves(10'000)}
                 .checked()) {
    reset();
  }
  static std::size_t n(index_t x) { return static_cast<std::size_t>(x); }
  std::size_t slots() const { return n(shape.heads) * n(shape.capacity); }
  std::size_t numbers() const { return n(shape.heads) * n(shape.capacity + shape.spare); }
  /// As it was, but for the rows' contents.
  void reset() {
    std::vector<index_t> order(numbers());
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = static_cast<index_t>(i % n(shape.capacity + shape.spare));
    }
    position = order, length = lengths, next_position = lengths;
    check(cudaMemset(log_mass.data(), 0, numbers() * sizeof(float)), "reset");
    cuda::clear(state_of_policy, view(), nullptr);
  }
  cuda::cache_view<bfloat16> view() const {
    const std::ptrdiff_t head = std::ptrdiff_t{shape.capacity} * shape.dim;
    return {{keys.data(), head, shape.dim},
            {values.data(), head, shape.dim},
            log_mass.data(),
            position.data(),
            length.data(),
            next_position.data(),
            shape.heads,
            shape.capacity,
            shape.dim,
            shape.group,
            spec.scale,
            &spec,
            nullptr,
            0,
            shape.capacity + shape.spare};
  }
  /// The state of a policy, as it is before anything was observed, also after `reset`.
  template <class Policy>
  cuda::state_view state(const Policy& p) {
    memory = std::vector<char>(cuda::state_bytes(p, view()));
    state_of_policy = cuda::make_state_view(p, view(), {memory.data(), memory.size()}, nullptr);
    return state_of_policy;
  }
  /// Bytes of K and V in use.
  double bytes() const { return 2.0 * shape.heads * shape.length * shape.dim * sizeof(bfloat16); }
};

/// A cache of `length` slots and the queries of all of them.
struct prompt {
  cache_on_device kv;
  buffer<bfloat16> queries;
  index_t count;

  prompt(index_t heads, index_t length, index_t group)
      : kv({heads, length, length, 128, group}),
        queries(normal(cache_on_device::n(heads * group) * cache_on_device::n(length) * 128)),
        count(length) {}
  cuda::query_rows<bfloat16> rows() const {
    const std::ptrdiff_t one = std::ptrdiff_t{count} * 128;
    return {queries.data(), count, one * kv.shape.group, one, 128};
  }
};

}  // namespace card
