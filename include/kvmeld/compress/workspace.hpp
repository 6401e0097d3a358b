// SPDX-License-Identifier: MIT
/// The memory that planning and attention of one head work in, lent for a call and kept.
#pragma once

#include <algorithm>  // std::max
#include <memory>     // std::unique_ptr
#include <mutex>
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

/// Memory that one head at a time works in; holds nothing between calls. One per thread.
struct workspace {
  std::vector<float> attention;    ///< [group, capacity] probabilities of the last step
  std::vector<float> log_sum_exp;  ///< [group] of the last step
  std::vector<float> combined;     ///< [capacity] the group's attention as one number per slot
  std::vector<float> input;       ///< [group + 2, row_dim] a step's rows that were given in 16 bits
  std::vector<float> own_output;  ///< [group, row_dim] of attention after a seal
  std::vector<Eigen::half> displaced;  ///< [2, 2, row_dim] newest keys and values
  slot_scratch scratch;                ///< of planning
  merge_plan plan;                     ///< the last plan made

  /// For a head.
  void reserve(const head_ref& head) { reserve(head.group(), head.row_dim(), head.capacity()); }
  /// `dim`: of keys or values, the larger.
  void reserve(index_t group, index_t dim, index_t capacity) {
    const auto g = as_size(group), n = as_size(capacity);
    attention.resize(std::max(attention.size(), g * n));
    log_sum_exp.resize(std::max(log_sum_exp.size(), g));
    combined.resize(std::max(combined.size(), n));
    input.resize(std::max(input.size(), (g + 2) * as_size(dim)));
    own_output.resize(std::max(own_output.size(), g * as_size(dim)));
    displaced.resize(std::max(displaced.size(), 4 * as_size(dim)));
    scratch.reserve(capacity), plan.reserve(capacity);
  }
};

namespace detail {

/// Workspaces for heads of one shape. Thread safe; allocates only when more are lent at a time than
/// ever before.
class workspace_pool {
 public:
  workspace_pool(index_t group, index_t dim, index_t capacity)
      : group_(group), dim_(dim), capacity_(capacity) {}

  /// So many workspaces for one call; its destructor gives them back.
  class lease {
   public:
    lease(workspace_pool& pool, index_t count) : pool_(pool) {
      const std::lock_guard lock(pool_.mutex_);
      while (static_cast<index_t>(pool_.free_.size()) < count) {
        auto made = std::make_unique<workspace>();
        made->reserve(pool_.group_, pool_.dim_, pool_.capacity_);
        pool_.free_.push_back(std::move(made));
      }
      first_ = std::move(pool_.free_.back());
      pool_.free_.pop_back();
      for (index_t i = 1; i < count; ++i) {
        others_.push_back(std::move(pool_.free_.back()));
        pool_.free_.pop_back();
      }
    }
    lease(const lease&) = delete;
    lease& operator=(const lease&) = delete;
    ~lease() {
      const std::lock_guard lock(pool_.mutex_);
      pool_.free_.push_back(std::move(first_));
      for (auto& one : others_) {
        pool_.free_.push_back(std::move(one));
      }
    }

    workspace& operator[](index_t worker) {
      return worker == 0 ? *first_ : *others_[as_size(worker - 1)];
    }

   private:
    workspace_pool& pool_;
    std::unique_ptr<workspace> first_;  // a serial call allocates nothing
    std::vector<std::unique_ptr<workspace>> others_;
  };

  /// Gives all scratch that is not lent back.
  void release() {
    const std::lock_guard lock(mutex_);
    free_.clear();
  }

 private:
  index_t group_, dim_, capacity_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<workspace>> free_;
};

}  // namespace detail

}  // namespace kvmeld::inline v0
