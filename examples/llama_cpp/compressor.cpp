// SPDX-License-Identifier: MIT
// The adapter for every policy, compiled once for all programs and tests.
#include "evaluate/policies.hpp"
#include "llama_cpp/llama_cpp.hpp"

namespace kvmeld::llama {

template class compressor<evaluate::any_policy>;

}  // namespace kvmeld::llama
