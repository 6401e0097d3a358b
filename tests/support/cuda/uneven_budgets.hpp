// SPDX-License-Identifier: MIT
/// Budgets of heads on both sides.
#pragma once

#include <vector>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/memory/head_budgets.cuh"

namespace kvmeld::cuda {

/// `of_first` for head 0; every further head has `apart` slots less. 0: one budget for all.
/// `mixed`: every second head has no trigger.
class uneven_budgets {
 public:
  uneven_budgets(const budget& of_first, index_t apart, index_t heads, bool mixed = false)
      : apart_(apart), host_(made(of_first, apart, heads, mixed)), device_(host_) {}

  const budget& operator[](index_t h) const { return host_[static_cast<std::size_t>(h)]; }
  std::span<const budget> host() const { return host_; }
  head_budgets limits() {
    return varied_       ? head_budgets::within(least_, most_, device_.data())
           : apart_ == 0 ? head_budgets(host_.front())
                         : head_budgets(host_, device_.data());
  }
  /// Between steps: up to three slots fewer, of every head another number.
  void vary(index_t step) {
    if (!varied_) {
      varied_ = true, given_ = host_, most_ = host_.front(), least_ = host_.back();
      least_.slots -= 3;
    }
    for (std::size_t h = 0; h < host_.size(); ++h) {
      const auto fewer = static_cast<index_t>((static_cast<std::size_t>(step) / 5 + h) % 4);
      host_[h].slots = device_.host()[h].slots = given_[h].slots - fewer;
    }
  }

 private:
  static std::vector<budget> made(budget x, index_t apart, index_t heads, bool mixed) {
    std::vector<budget> all;
    for (index_t h = 0; h < heads; ++h) {
      all.push_back(x);
      all.back().trigger = mixed && h % 2 == 1 ? 0 : x.trigger;
      x.slots -= apart, x.trigger -= x.trigger > 0 ? apart : 0;
    }
    return all;
  }

  index_t apart_;
  bool varied_ = false;
  budget least_, most_;
  std::vector<budget> host_, given_;
  device_buffer<budget> device_;
};

}  // namespace kvmeld::cuda
