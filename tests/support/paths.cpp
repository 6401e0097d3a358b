#include "support/paths.hpp"

namespace paths {

std::string source(const std::string& file) { return KVFOLD_SOURCE_DIR "/" + file; }
std::string gguf() { return KVFOLD_GGUF; }

}  // namespace paths
