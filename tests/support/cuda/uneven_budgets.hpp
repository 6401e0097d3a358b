// SPDX-License-Identifier: MIT
/// Budgets of heads on both sides.
#pragma once

#include <vector>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/memory/head_budgets.cuh"

namespace kvmeld::cuda {

/// `of_first` for head 0; every further head has `apart` slots less. 0: one budget for all.
class uneven_budgets {
 public:
  uneven_budgets(const budget& of_first, index_t apart, index_t heads)
      : apart_(apart), host_(made(of_first, apart, heads)), device_(host_) {}

  const budget& operator[](index_t h) const { return host_[static_cast<std::size_t>(h)]; }
  std::span<const budget> host() const { return host_; }
  head_budgets limits() {
    return apart_ == 0 ? head_budgets(host_.front()) : head_budgets(host_, device_.data());
  }

 private:
  static std::vector<budget> made(budget x, index_t apart, index_t heads) {
    std::vector<budget> all;
    for (index_t h = 0; h < heads; ++h) {
      all.push_back(x);
      x.slots -= apart, x.trigger -= x.trigger > 0 ? apart : 0;
    }
    return all;
  }

  index_t apart_;
  std::vector<budget> host_;
  device_buffer<budget> device_;
};

}  // namespace kvmeld::cuda
