// The safetensors reader: a file is refused with a format error, or every tensor in it can be read.
#include "engine/safetensors.hpp"

#include "file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::memory_file file;
  try {
    const engine::safetensors_file tensors(file.holding(data, size));
    for (const char* const name : {"w", "a", ""}) {
      try {
        if (tensors.contains(name)) {
          (void)tensors.matrix(name, 2, 3);
        }
        (void)tensors.vector(name, 6);
      } catch (const engine::format_error&) {
      }
    }
  } catch (const engine::format_error&) {
  }
  return 0;
}
