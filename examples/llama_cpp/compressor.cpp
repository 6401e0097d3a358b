// SPDX-License-Identifier: MIT
// The adapter for every policy, compiled once for all programs and tests.
#include "llama_cpp/session.hpp"

namespace kvmeld::llama {

template class compressor<evaluate::any_policy>;

}  // namespace kvmeld::llama
