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
      : bounds_{of_all, of_all} {}
  /// `host [heads]`, and the same numbers in device memory. A target there that is not between the
  /// smallest and the largest of the host's is taken as the nearer of these. `host` is read by
  /// calls alone, until they return.
  head_budgets(std::span<const budget> host, const budget* device)
      : host_(host), device_(device), each_(true) {
    for (const budget& x : host) {
      bounds_[1].slots = std::max(bounds_[1].slots, x.slots);
      bounds_[0].slots = &x == host.data() ? x.slots : std::min(bounds_[0].slots, x.slots);
    }
  }
  /// Budgets `device [heads]` that change between replays of a graph, within two that are checked:
  /// a target or a trigger outside is taken as the nearer of theirs. Where these have no trigger,
  /// none has.
  static head_budgets within(const budget& least, const budget& most, const budget* device) {
    head_budgets x;
    x.bounds_[0] = least, x.bounds_[1] = most, x.device_ = device, x.each_ = true;
    x.within_ = true;
    return x;
  }

  index_t most_target() const { return bounds_[1].slots; }
  /// Is every trigger its target + 1?
  bool one_by_one() const {
    const auto checked = host();
    return std::all_of(checked.begin(), checked.end(),
                       [](const budget& x) { return x.trigger_length() == x.slots + 1; });
  }
  /// The same targets, whatever the triggers are.
  head_budgets without_triggers() const {
    head_budgets x = *this;
    x.bounds_[0].trigger = x.bounds_[1].trigger = 0, x.triggers_ = false;
    return x;
  }
  bool has_triggers() const { return triggers_; }
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
    if (each_ && !within_) {
      expects(host_.size() == static_cast<std::size_t>(heads), what, ": expected ", heads,
              " budgets (one per head), got ", host_.size());
    }
    expects(!within_ || bounds_[0].slots <= bounds_[1].slots, what, ": expected targets within ",
            bounds_[0].slots, " to at least as many slots, got ", bounds_[1].slots);
    if (each_) {
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
      return bounds_[1];
    }
    const budget x = device_[h];
    const index_t least = bounds_[0].slots, most = bounds_[1].slots,
                  target = x.slots < most ? x.slots : most;
    index_t trigger = triggers_ ? x.trigger : 0;
    if (within_) {
      const index_t low = bounds_[0].trigger, high = bounds_[1].trigger;
      trigger = trigger < high ? trigger : high;
      trigger = low > 0 && trigger < low ? low : trigger;
    }
    return {target > least ? target : least, trigger};
  }

 private:
  std::span<const budget> host() const {
    return within_ ? std::span(bounds_) : each_ ? host_ : std::span(bounds_).first(1);
  }

  budget bounds_[2];  // of the smallest and of the largest target
  std::span<const budget> host_;
  const budget* device_ = nullptr;
  bool each_ = false, within_ = false, triggers_ = true, none_due_ = false;
};

/// What calls take: `{.slots = 205}`, or `head_budgets`.
template <class T>
concept budgets = std::same_as<T, budget> || std::same_as<T, head_budgets>;

}  // namespace kvmeld::cuda
