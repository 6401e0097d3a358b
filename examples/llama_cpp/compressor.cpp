// SPDX-License-Identifier: MIT
#include "llama_cpp/compressor.hpp"

namespace kvmeld::llama {

template class compressor<evaluate::any_policy>;

}  // namespace kvmeld::llama
