// SPDX-License-Identifier: MIT
/// What operators take beside tensors, and what becomes of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>  // std::int64_t
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/error.hpp"

namespace kvmeld_torch {

using kvmeld::index_t;

using ints = at::IntArrayRef;
using maybe_tensor = std::optional<at::Tensor>;
using maybe_heads = at::OptionalIntArrayRef;
using text = std::string;

inline std::span<const std::int64_t> span_of(ints x) { return {x.data(), x.size()}; }

/// The heads that a call is for, of `all`; none: all of them. Refused: heads that are not there.
inline std::optional<std::vector<index_t>> heads_of(const maybe_heads& listed, index_t all) {
  if (!listed.has_value()) {
    return {};
  }
  std::vector<index_t> heads;
  for (const std::int64_t h : *listed) {
    kvmeld::expects(h >= 0 && h < all, "heads: expected 0 to ", all - 1, ", got ", h);
    heads.push_back(static_cast<index_t>(h));
  }
  return heads;
}

/// A number above 0 that an index holds.
inline index_t positive(const char* what, std::int64_t x) {
  kvmeld::expects(x > 0 && x < 1'000'000'000, what, ": expected 1 to 1e9, got ", x);
  return static_cast<index_t>(x);
}

}  // namespace kvmeld_torch
