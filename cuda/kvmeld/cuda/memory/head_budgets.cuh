// SPDX-License-Identifier: MIT
/// How many slots heads may hold on the device: all the same, or each its own.
#pragma once

#include <algorithm>  // std::all_of, std::max, std::min
#include <concepts>   // std::same_as
#include <span>

#include "kvmeld/budget.hpp"
#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {

/// One budget for all heads, or one for each, active or not. Calls check the host's, and what is
/// launched and the workspace go by the largest target of these; kernels read the device's when
/// they run.
class head_budgets {
 public:
  head_budgets() = default;
  head_budgets(const budget& of_all)  // NOLINT: as on the CPU, a budget is one for all
      : all_(of_all), least_(of_all.slots) {}
  /// `host [heads]`, and the same numbers in device memory. A target there that is not between the
  /// smallest and the largest of the host's is taken as the nearer of these. `host` is read by
  /// calls alone, until they return.
  head_budgets(std::span<const budget> host, const budget* device)
      : host_(host), device_(device), each_(true) {
    for (const budget& x : host) {
      all_.slots = std::max(all_.slots, x.slots);
      least_ = &x == host.data() ? x.slots : std::min(least_, x.slots);
    }
  }

  index_t most_target() const { return all_.slots; }
  /// Is every trigger its target + 1?
  bool one_by_one() const {
    const auto checked = host();
    return std::all_of(checked.begin(), checked.end(),
                       [](const budget& x) { return x.trigger_length() == x.slots + 1; });
  }
  /// The same targets, whatever the triggers are.
  head_budgets without_triggers() const {
    head_budgets x = *this;
    x.all_.trigger = 0, x.triggers_ = false;
    return x;
  }
  /// The same budgets in a step of which the host knows that no head reaches its trigger: no plan
  /// is launched. A head that reaches it all the same is brought back by a later step.
  head_budgets with_none_due() const {
    head_budgets x = *this;
    x.none_due_ = true;
    return x;
  }
  bool none_due() const { return none_due_; }
  /// Refuses budgets that are not as many as heads; then `check_one(budget)` of each.
  template <class CheckOne>
  void check(index_t heads, const char* what, CheckOne check_one) const {
    if (each_) {
      expects(host_.size() == static_cast<std::size_t>(heads), what, ": expected ", heads,
              " budgets (one per head), got ", host_.size());
      expects(heads == 0 || device_ != nullptr, what,
              ": expected the budgets on the device too, got null");
    }
    for (const budget& x : host()) {
      check_one(x);
    }
  }

  /// Of head `h`.
  KVMELD_DEVICE budget of(index_t h) const {
    if (!each_) {
      return all_;
    }
    const budget x = device_[h];
    const index_t target = x.slots < all_.slots ? x.slots : all_.slots;
    return {target > least_ ? target : least_, triggers_ ? x.trigger : 0};
  }

 private:
  std::span<const budget> host() const { return each_ ? host_ : std::span(&all_, 1); }

  budget all_;  // `each_`: the largest target
  index_t least_ = 0;
  std::span<const budget> host_;
  const budget* device_ = nullptr;
  bool each_ = false, triggers_ = true, none_due_ = false;
};

/// What calls take: `{.slots = 205}`, or `head_budgets`.
template <class T>
concept budgets = std::same_as<T, budget> || std::same_as<T, head_budgets>;

}  // namespace kvmeld::cuda
