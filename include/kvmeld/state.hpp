// SPDX-License-Identifier: MIT
/// The state of all heads, the memory that planning and attention work in, and heads that are used
/// again: by the next request, by a fork, in less memory.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::size_t
#include <span>
#include <vector>

#include "kvmeld/compress/reuse.hpp"
#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/score/key_comparison.hpp"
#include "kvmeld/search/slot_scratch.hpp"

namespace kvmeld {
inline namespace v0 {

/// The state of all heads, and a workspace for every worker of an executor.
class state {
 public:
  /// States of all heads, and a workspace for each worker, as `make_state` makes them.
  state(std::vector<head_state> heads, std::vector<workspace> work)
      : heads_(std::move(heads)), work_(std::move(work)) {}

  /// How many heads there are, the state of one, how many workspaces, and one of these.
  /// @{
  index_t heads() const { return static_cast<index_t>(heads_.size()); }
  head_state& operator[](index_t h) { return heads_[static_cast<std::size_t>(h)]; }
  const head_state& operator[](index_t h) const { return heads_[static_cast<std::size_t>(h)]; }
  index_t workers() const { return static_cast<index_t>(work_.size()); }
  kvmeld::workspace& workspace(index_t worker = 0) {
    return work_[static_cast<std::size_t>(worker)];
  }

  /// @}

  /// Gives columns beyond `capacity` slots and all scratch back, which grows again at its next use.
  void shrink(index_t capacity) {
    for (head_state& h : heads_) {
      h.shrink(std::min(capacity, h.capacity()));
    }
    for (kvmeld::workspace& w : work_) {
      const std::size_t group = w.log_sum_exp.size(), dim = w.input.size() / (group + 2);
      kvmeld::workspace smaller;
      smaller.reserve(static_cast<index_t>(group), static_cast<index_t>(dim), capacity);
      w = std::move(smaller);
    }
  }

  /// Bytes that go with the slots in use (the workspaces, shared by all heads, not counted).
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const head_state& h : heads_) {
      sum += h.bytes();
    }
    return sum;
  }

 private:
  std::vector<head_state> heads_;
  std::vector<kvmeld::workspace> work_;
};

// ---------------------------------------------------------------------------- heads used again

/// Empties head `h` of `kv`, as when a request has ended. Refused: a head that is not there.
void clear(kv_cache auto& kv, state& state, index_t h) {
  expects(state.heads() == kv.heads(), "clear: expected a state of ", kv.heads(), " heads, got ",
          state.heads());
  expects(h >= 0 && h < kv.heads(), "clear: expected a head from 0 to ", kv.heads() - 1, ", got ",
          h);
  clear(kv.head(h), state[h]);
}

/// Makes head `to` of `kv` what head `from` is, as for a beam or a request that shares a prompt.
void copy(kv_cache auto& kv, state& state, index_t from, index_t to) {
  expects(state.heads() == kv.heads(), "copy: expected a state of ", kv.heads(), " heads, got ",
          state.heads());
  for (const index_t h : {from, to}) {
    expects(h >= 0 && h < kv.heads(), "copy: expected heads 0 to ", kv.heads() - 1, ", got ", h);
  }
  if (from != to) {
    copy(kv.head(from), state[from], kv.head(to), state[to]);
  }
}

/// Gives memory back: `capacity` slots a head from here on, as after a prompt was compressed. Old
/// and new memory are held together while rows move. Views of heads that were taken before are
/// invalid afterwards, and scratch grows again at its next use. A policy's memory keeps its layout,
/// and so its size.
/// Refused, with nothing changed: more slots than there are, fewer than a head holds
/// (`no_capacity`).
inline void shrink(cache& kv, state& state, index_t capacity) {
  expects(state.heads() == kv.heads(), "shrink: expected a state of ", kv.heads(), " heads, got ",
          state.heads());
  for (index_t h = 0; h < kv.heads(); ++h) {
    expects(errc::no_capacity, state[h].length() <= capacity,
            "shrink: expected a capacity of at least ", state[h].length(), " slots, got ",
            capacity);
  }
  kv.shrink(capacity);
  state.shrink(capacity);
}

}  // namespace v0
}  // namespace kvmeld
