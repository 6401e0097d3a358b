// SPDX-License-Identifier: MIT
/// Copies to shared memory that one thread of the CUDA emulator has in flight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "cuda/traffic.hpp"

namespace kvmeld::cuda::emulator {

class copies {
 public:
  /// It arrives in a `wait`.
  void later(std::function<void()> copy) {
    open_.push_back(std::move(copy));
    ++on_their_way_;
    if (traffic::current != nullptr) {
      traffic::current->copies_at_once = std::max(traffic::current->copies_at_once, on_their_way_);
    }
  }
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  /// Until at most `groups` are in flight.
  void wait(std::size_t groups) {
    ++waits_;
    if (traffic::current != nullptr) {
      traffic::current->waits = std::max(traffic::current->waits, waits_);
    }
    while (groups_.size() > groups) {
      on_their_way_ -= groups_.front().size();
      for (const auto& copy : groups_.front()) {
        copy();
      }
      groups_.erase(groups_.begin());
    }
  }

 private:
  std::vector<std::function<void()>> open_;
  std::vector<std::vector<std::function<void()>>> groups_;
  std::size_t on_their_way_ = 0, waits_ = 0;
};

}  // namespace kvmeld::cuda::emulator
