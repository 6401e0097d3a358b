// SPDX-License-Identifier: MIT
// The reader of config.json: refused with a format error, or a shape that a decoder can have.
#include "engine/config.hpp"

#include "bytes.hpp"
#include "engine/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::filesystem::path file = "config.json";
  try {
    const auto c = engine::config::parse({reinterpret_cast<const char*>(data), size}, file);
    fuzz::must(c.hidden > 0 && c.intermediate > 0 && c.layers > 0 && c.vocab > 0, "sizes");
    fuzz::must(c.heads > 0 && c.kv_heads > 0 && c.heads % c.kv_heads == 0 && c.group() > 0,
               "heads");
    fuzz::must(c.dim > 0 && c.dim % 2 == 0 && c.max_positions >= 0, "dim");
    fuzz::must(c.norm_epsilon >= 0 && c.rope.base() > 1, "numbers");
  } catch (const engine::format_error&) {
  }
  return 0;
}
