// SPDX-License-Identifier: MIT
/// Scratch of calls that may run at the same time: lent for a call, kept for the next.
#pragma once

#include <memory>  // std::unique_ptr
#include <mutex>
#include <vector>

#include "kvmeld/compress/workspace.hpp"

namespace kvmeld {
inline namespace v0 {
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
      return worker == 0 ? *first_ : *others_[static_cast<std::size_t>(worker - 1)];
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
  /// Lends for heads of `capacity` slots from now on.
  void shrink(index_t capacity) {
    release();
    capacity_ = capacity;
  }

 private:
  index_t group_, dim_, capacity_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<workspace>> free_;
};

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
