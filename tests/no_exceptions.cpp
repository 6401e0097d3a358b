// SPDX-License-Identifier: MIT
// Compiled with -fno-exceptions: a refused call goes to the handler that was set, or ends the
// program with the message.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/h2o.hpp"

int main(int argc, char** /*unused*/) {
  if (argc > 1) {
    kvmeld::refusal_handler = [](kvmeld::errc code, const char* message) {
      const bool right =
          code == kvmeld::errc::no_capacity &&
          std::string_view(message).starts_with("kvmeld: append: expected at most 16 tokens");
      std::exit(right ? EXIT_SUCCESS : EXIT_FAILURE);
    };
  }
  const kvmeld::attention_spec spec{.kv_heads = 1, .group = 1, .key_dim = 4};
  const std::vector<float> rows(17 * 4, 1.0F), row(4, 1.0F);
  std::vector<float> out(4);
  kvmeld::cache kv(spec, {.capacity = 16});
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{.slots = 12});
  for (int t = 0; t < 20; ++t) {
    meld.step(kv.heads(0, 0), {row, row, row}, out);
  }
  meld.clear(0);
  std::vector<kvmeld::index_t> table{0, 1};
  std::vector<float> k(8 * 4), v(8 * 4);
  kvmeld::paged_cache pages(spec, {.capacity = 8}, kvmeld::rows(k, kvmeld::layout::pages_nhd),
                            kvmeld::rows(v, kvmeld::layout::pages_nhd),
                            {.pages = table, .slots = 4});
  pages.append(pages.heads(0, 0), std::span(rows).first(16), std::span(rows).first(16), 4);
  kv.append(kv.heads(0, 0), rows, rows, 17);
  return EXIT_FAILURE;
}
