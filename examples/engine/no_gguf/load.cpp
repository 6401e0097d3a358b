// SPDX-License-Identifier: MIT
#include "engine/error.hpp"
#include "engine/model.hpp"

namespace engine {

model load_gguf(const std::filesystem::path& file) {
  throw format_error(file,
                     "expected a folder: this build has no libllama, which reads GGUF files; "
                     "bash examples/run --model FILE.gguf builds it");
}

}  // namespace engine
