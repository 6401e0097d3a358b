// SPDX-License-Identifier: MIT
// The safetensors reader: a file is refused with a format error, or every tensor in it can be read.
#include "engine/safetensors.hpp"

#include <sstream>

#include "bytes.hpp"
#include "engine/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::filesystem::path file = "model.safetensors";
  try {
    const std::string bytes(data, data + size);
    const engine::safetensors_file tensors(std::make_unique<std::istringstream>(bytes), file);
    for (const char* const name : {"w", "a", ""}) {
      if (!tensors.contains(name)) {
        continue;
      }
      try {
        (void)tensors.matrix(name, 2, 3);
      } catch (const engine::format_error&) {
        try {
          (void)tensors.vector(name, 6);
        } catch (const engine::format_error&) {
        }
      }
    }
  } catch (const engine::format_error&) {
  }
  return 0;
}
