// SPDX-License-Identifier: MIT
/// The adapter for policies chosen at run time, compiled once.
#pragma once

#include "evaluate/policies.hpp"
#include "llama_cpp/llama_cpp.hpp"

namespace kvmeld::llama {

extern template class compressor<evaluate::any_policy>;

}  // namespace kvmeld::llama
