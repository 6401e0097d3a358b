/// One head as rules see it, and numbers as they are ordered.
#pragma once

#include <cstring>  // std::memcpy

#include "kvfold/cuda/device/block_collectives.cuh"
#include "kvfold/cuda/view.cuh"

namespace kvfold::cuda {

/// One head as a rule sees it.
struct head_context {
  const index_t* position;  ///< [capacity]
  const float* log_mass;    ///< [capacity]
  float* columns;
  std::ptrdiff_t stride;  ///< column to column
  float* memory;
  index_t newest;        ///< the latest position
  index_t head;          ///< which one it is
  std::ptrdiff_t first;  ///< its slot 0 in arrays `[heads, capacity]`

  KVFOLD_DEVICE float& column(index_t c, index_t s) const { return columns[c * stride + s]; }
};

template <class Scalar>
KVFOLD_DEVICE head_context context_of(const cache_view<Scalar>& cache, const state_view& state,
                                      index_t h, index_t newest) {
  return {cache.position + cache.slot(h, 0),
          cache.log_mass + cache.slot(h, 0),
          state.columns + cache.slot(h, 0),
          std::ptrdiff_t{cache.heads} * cache.capacity,
          state.memory + std::ptrdiff_t{h} * state.floats,
          newest,
          h,
          cache.slot(h, 0)};
}

/// The latest position among a head's `n` slots, by a block.
template <class Scalar, index_t Threads>
KVFOLD_DEVICE index_t newest_of(of_warps<index_t, Threads>& shared, const cache_view<Scalar>& cache,
                                index_t h, index_t n) {
  index_t newest = -1;
  for (index_t s = thread_index(); s < n; s += Threads) {
    const index_t p = cache.position[cache.slot(h, s)];
    newest = p > newest ? p : newest;
  }
  return block_max(shared, newest);
}

/// `of(g)` of a group's query heads as one number; no number is below 0.
template <class Of>
KVFOLD_DEVICE float combined(group_combine how, index_t group, Of of) {
  float a = 0;
  for (index_t g = 0; g < group; ++g) {
    const float p = of(g);
    a = how != group_combine::max ? a + p : p > a ? p : a;
  }
  return how == group_combine::mean ? a / static_cast<float>(group) : a;
}

/// Numbers as integers in the same order; NaN the lowest, zeros equal.
KVFOLD_HD inline unsigned ordered(float x) {
  const float y = rank(x) + 0.0F;
  unsigned bits = 0;
  memcpy(&bits, &y, sizeof bits);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
/// The inverse of `ordered`.
KVFOLD_HD inline float number_of(unsigned order) {
  const unsigned bits = (order & 0x80000000U) != 0 ? order ^ 0x80000000U : ~order;
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}
KVFOLD_HD inline unsigned ordered(index_t x) { return static_cast<unsigned>(x) ^ 0x80000000U; }

/// The rule for a plan of this head's `n` slots: what it depends on is counted by the block.
template <class Rule, index_t Threads>
KVFOLD_DEVICE Rule prepared(Rule rule, of_warps<index_t, Threads>& shared, const head_context& head,
                            index_t n) {
  if constexpr (requires { rule.of_length(n); }) {
    rule.of_length(n);
  }
  if constexpr (requires { rule.counted(head, n); }) {
    index_t count = 0;
    for (index_t s = thread_index(); s < n; s += Threads) {
      count += rule.counted(head, s) ? 1 : 0;
    }
    rule.prepare(block_sum(shared, count));
  }
  return rule;
}

}  // namespace kvfold::cuda
