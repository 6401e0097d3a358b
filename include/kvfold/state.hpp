/// The state of all heads, and the memory that planning and attention work in.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::size_t
#include <span>
#include <vector>

#include "kvfold/memory/head_state.hpp"
#include "kvfold/merge/plan.hpp"
#include "kvfold/score/key_comparison.hpp"
#include "kvfold/search/slot_scratch.hpp"

namespace kvfold {

/// Memory that one head at a time works in; holds nothing between calls. One per thread.
struct workspace {
  std::vector<float> attention;    ///< [group, capacity] probabilities of the last step
  std::vector<float> log_sum_exp;  ///< [group] of the last step
  std::vector<float> combined;     ///< [capacity] the group's attention as one number per slot
  slot_scratch scratch;            ///< of planning
  merge_plan plan;                 ///< the last plan made
  key_comparison comparison;       ///< what the last step's attention has answered

  void reserve(index_t group, index_t capacity) {
    const auto n = static_cast<std::size_t>(capacity);
    attention.resize(std::max(attention.size(), static_cast<std::size_t>(group) * n));
    log_sum_exp.resize(std::max(log_sum_exp.size(), static_cast<std::size_t>(group)));
    combined.resize(std::max(combined.size(), n));
    scratch.reserve(capacity), plan.reserve(capacity);
  }
};

/// The state of all heads, and a workspace for every worker of an executor.
class state {
 public:
  state(std::vector<head_state> heads, std::vector<workspace> work)
      : heads_(std::move(heads)), work_(std::move(work)) {}

  index_t heads() const { return static_cast<index_t>(heads_.size()); }
  head_state& operator[](index_t h) { return heads_[static_cast<std::size_t>(h)]; }
  const head_state& operator[](index_t h) const { return heads_[static_cast<std::size_t>(h)]; }
  index_t workers() const { return static_cast<index_t>(work_.size()); }
  kvfold::workspace& workspace(index_t worker = 0) {
    return work_[static_cast<std::size_t>(worker)];
  }

  /// Gives columns beyond `capacity` slots and all scratch back, which grows again at its next use.
  void shrink(index_t capacity) {
    for (head_state& h : heads_) {
      h.shrink(std::min(capacity, h.capacity()));
    }
    for (kvfold::workspace& w : work_) {
      kvfold::workspace smaller;
      smaller.reserve(static_cast<index_t>(w.log_sum_exp.size()), capacity);
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
  std::vector<kvfold::workspace> work_;
};

}  // namespace kvfold
