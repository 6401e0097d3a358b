// SPDX-License-Identifier: MIT
/// What operators take beside tensors, and what becomes of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>  // std::int64_t
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvmeld/memory/head_selection.hpp"

namespace kvmeld_torch {

using kvmeld::index_t;

using ints = at::IntArrayRef;
using maybe_tensor = std::optional<at::Tensor>;
using maybe_heads = at::OptionalIntArrayRef;
using numbers = c10::ArrayRef<double>;
using text = std::string;

inline std::span<const std::int64_t> span_of(ints x) { return {x.data(), x.size()}; }
inline std::span<const double> span_of(numbers x) { return {x.data(), x.size()}; }

/// The heads that a call is for: all, or those listed.
class selection {
 public:
  selection(index_t all, const maybe_heads& listed) : all_(!listed.has_value()), count_(all) {
    if (!all_) {
      for (const std::int64_t h : *listed) {
        kvmeld::expects(h >= 0 && h < all, "heads: expected 0 to ", all - 1, ", got ", h);
        list_.push_back(static_cast<index_t>(h));
      }
      count_ = static_cast<index_t>(list_.size());
    }
  }
  index_t count() const { return count_; }
  bool all() const { return all_; }
  const std::vector<index_t>& list() const { return list_; }
  operator kvmeld::head_selection() const {  // NOLINT: it is one
    return all_ ? kvmeld::head_selection(kvmeld::head_range{0, count_})
                : kvmeld::head_selection(list_);
  }

 private:
  bool all_;
  index_t count_;
  std::vector<index_t> list_;
};

/// A number above 0 that an index holds.
inline index_t positive(const char* what, std::int64_t x) {
  kvmeld::expects(x > 0 && x < 1'000'000'000, what, ": expected 1 to 1e9, got ", x);
  return static_cast<index_t>(x);
}

}  // namespace kvmeld_torch
