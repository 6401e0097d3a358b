// SPDX-License-Identifier: MIT
// The reader of saved caches: refused with nothing changed, or a cache that is as long as it says.
// A checksum is put behind most inputs, or none would be read to the end.
#include <fstream>
#include <sstream>
#include <string>

#include "bytes.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/snapkv.hpp"
#include "support/all_heads.hpp"

namespace {

struct saved {
  kvmeld::snapkv policy{.window = 2};
  kvmeld::cache kv{kvmeld::attention_spec{.kv_heads = 2, .group = 1, .key_dim = 3},
                   {.capacity = 8}};
  fixtures::state state = fixtures::make_state(policy, kv);

  explicit saved(int tokens) {
    const std::vector<float> x(3, 0.5F);
    for (int t = 0; t < tokens; ++t) {
      kv.append(kvmeld::head_range{t % 2, 1}, x, x, 1);
    }
  }
  std::string bytes() {
    std::ostringstream out;
    save(out, policy, kv, state);
    return out.str();
  }
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::string((*argv)[1]) == "--seed") {
    const std::string all = saved(9).bytes();
    std::ofstream((*argv)[2], std::ios::binary) << '\1' << all.substr(0, all.size() - 4);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) {
    return 0;
  }
  std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] != 0) {
    kvmeld::detail::crc32 sum;
    sum.add(std::span(data + 1, size - 1));
    for (int i = 0; i < 4; ++i) {
      text += static_cast<char>(sum.value() >> (8 * i) & 0xFF);
    }
  }
  static saved empty(5);
  static const std::string before = empty.bytes();
  saved into = empty;
  std::istringstream in(text);
  try {
    load(in, into.policy, into.kv, into.state);
    for (int h = 0; h < 2; ++h) {
      const auto head = into.kv.head(h);
      fuzz::must(head.length() >= 0 && head.length() <= 8 && head.length() <= head.next_position(),
                 "length");
      fuzz::must(into.state[h].length() <= head.length(), "columns");
    }
    const std::string after = into.bytes();
    fuzz::must(after == text.substr(0, after.size()), "saved again, the same bytes");
  } catch (const kvmeld::error&) {
    fuzz::must(into.bytes() == before, "nothing changed when refused");
  }
  return 0;
}
