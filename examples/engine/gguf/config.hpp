// SPDX-License-Identifier: MIT
/// A model's shape, from the values of a GGUF file.
#pragma once

#include <optional>

#include "engine/config.hpp"
#include "engine/gguf/file.hpp"

namespace engine::gguf {

struct architecture {
  config shape;
  /// Are pairs of a rotation adjacent rows of `attn_q` and `attn_k`? Else they are half a head
  /// apart, as this engine has them.
  bool adjacent_pairs = false;
};

architecture read_architecture(const file& from);

/// Llama 3.1's or 3.2's scaling, if dividing the frequencies of `plain` by `factors [dim / 2]`
/// gives it.
std::optional<kvmeld::rotary> llama3_of(const kvmeld::rotary& plain, const float* factors,
                                        index_t dim);

}  // namespace engine::gguf
