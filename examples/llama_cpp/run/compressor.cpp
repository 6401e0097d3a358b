// SPDX-License-Identifier: MIT
// The adapter for every policy of the library, compiled once.
#include "llama_cpp/run/context.hpp"

namespace kvmeld::llama {

template class compressor<any_policy>;

}  // namespace kvmeld::llama
