// SPDX-License-Identifier: MIT
#include "support/paths.hpp"

namespace paths {

std::string source(const std::string& file) { return KVMELD_SOURCE_DIR "/" + file; }
std::string gguf() { return KVMELD_GGUF; }

}  // namespace paths
