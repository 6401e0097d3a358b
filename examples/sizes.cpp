// SPDX-License-Identifier: MIT
// What a request's keys and values take, by storage and budget: no model is needed.
//
//     sizes --layers 32 --kv-heads 8 --dim 128 --tokens 32768          Llama 3.1 8B
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "kvmeld/kvmeld.hpp"

namespace {

using kvmeld::index_t;

double mib(double bytes) { return bytes / 1048576.0; }

/// Slots of a head on average, as a compressor finds them; "-": too few.
std::string slots_in(std::int64_t bytes, const kvmeld::attention_spec& layer, index_t layers,
                     index_t tokens, const kvmeld::storage_pair& rows) {
  kvmeld::cache kv(layer, {.layers = layers,
                           .capacity = tokens + 1,
                           .keys = rows.keys,
                           .values = rows.values,
                           .newest = rows.newest});
  try {
    const kvmeld::compressor meld(kv, kvmeld::any_policy(kvmeld::fold{}),
                                  kvmeld::budget::shared_bytes(bytes));
    return std::to_string(meld.limit(0).trigger_length() - 1);
  } catch (const kvmeld::error&) {
    return "-";
  }
}

}  // namespace

int main(int count, char** arguments) try {
  index_t layers = 32, kv_heads = 8, group = 4, dim = 128, tokens = 32768;
  CLI::App app("Bytes of a request's keys and values, by storage and budget.", "sizes");
  const auto add = [&](const char* name, index_t& value, const char* meaning) {
    app.add_option(name, value, meaning)->check(CLI::Range(1, 1 << 24))->capture_default_str();
  };
  add("--layers", layers, "that attend to all tokens");
  add("--kv-heads", kv_heads, "of a layer");
  add("--group", group, "query heads per KV head");
  add("--dim", dim, "of a head");
  add("--tokens", tokens, "of a request");
  try {
    app.parse(count, arguments);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    return 0;
  } catch (const CLI::Error& e) {
    std::fprintf(stderr, "sizes: %s\n", e.what());
    return 2;
  }

  const kvmeld::attention_spec layer{.kv_heads = kv_heads, .group = group, .key_dim = dim};
  kvmeld::cache kv(layer, {.layers = layers, .capacity = tokens + 1});
  const auto half = kvmeld::bytes_in_half(kv, tokens);
  std::printf("%d tokens in 16 bits: %.0f MiB. fold, a shared budget, its state included:\n\n",
              tokens, mib(static_cast<double>(half)));
  std::printf("%-6s %9s  slots per head in\n", "rows", "all, MiB");
  std::printf("%-6s %9s %9s %9s %9s\n", "", "", "20 %", "10 %", "5 %");
  for (const char* const name : {"half", "q8_0", "k8v4", "k6v4", "k4v4"}) {
    const kvmeld::storage_pair rows = kvmeld::make_storage(name);
    const auto all =
        static_cast<double>(kvmeld::head_bytes(rows, dim, dim, tokens)) * kv_heads * layers;
    std::printf("%-6s %9.0f", name, mib(all));
    for (const double share : {0.2, 0.1, 0.05}) {
      const auto bytes = static_cast<std::int64_t>(share * static_cast<double>(half));
      std::printf(" %9s", slots_in(bytes, layer, layers, tokens, rows).c_str());
    }
    std::printf("\n");
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "sizes: %s\n", e.what());
  return 2;
}
