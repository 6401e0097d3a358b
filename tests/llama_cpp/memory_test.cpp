// SPDX-License-Identifier: MIT
// What the adapter says that it holds and reserves, and what the process then has.
#include <malloc.h>  // mallinfo2

#include <catch2/catch.hpp>

#include "llama_cpp/files.hpp"

namespace memory_test {

using namespace test;
using kvmeld::budget;
using kvmeld::llama::mode;

constexpr index_t chunk = 64;

/// Bytes that the whole process has of malloc, llama.cpp's among them.
std::size_t heap_bytes() {
  const struct mallinfo2 all = mallinfo2();
  return all.uordblks + all.hblkhd;
}

TEST_CASE(
    "llama.cpp: bytes are rows, log-mass, positions and columns, in use and reserved, and repack's "
    "rows are all cells") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab);
  const std::vector<budget> limits = {{.slots = 24}, {.slots = 96}, {.slots = 64}, {.slots = 32}};
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16}) {
    const std::size_t row = 2 * 16 * ggml_type_size(type);  // a key and a value
    for (const mode how : {mode::repack, mode::own_attention}) {
      auto parameters = exact_parameters(256, chunk);
      parameters.type_k = parameters.type_v = type;
      compressed_llama kv(models.theirs.get(), policy_named("h2o"), {.how = how, .limits = limits},
                          parameters);
      run(kv, text);
      const auto r = kv.kv.report();
      const std::size_t slots = 24 + 96 + 64 + 32, rows = how == mode::repack ? 4 * 96 : slots;
      CHECK(r.tokens == 192);
      CHECK(r.slots == 96);
      CHECK(r.bytes == rows * row + slots * (4 + 4 + 4));  // h2o has one column
      CHECK(r.full_bytes == 192 * 4 * row);
      // The engine's 256 cells in either mode; the rest in whole pages of the system's, of which a
      // head's rows and records begin and end in the middle.
      const std::size_t engine = 4 * 256 * row, page = 4096,
                        own = how == mode::repack ? 0 : slots * row;
      CHECK(r.reserved_bytes >= engine + own + slots * (4 + 4 + 4));
      CHECK(r.reserved_bytes <= engine + own + slots * (4 + 4 + 4) + 4 * 5 * 2 * page);
    }
  }
}

TEST_CASE("llama.cpp: 20,000 tokens in constant memory") {
  twin models;
  const auto text = draw_tokens(20000, models.shape.vocab);
  for (const auto& [how, name] : {std::pair{mode::repack, "h2o"}, {mode::own_attention, "fold"}}) {
    CAPTURE(name);
    compressed_llama kv(models.theirs.get(), policy_named(name),
                        {.how = how, .limits = {{.slots = 96}}}, exact_parameters(256, chunk));
    std::size_t bytes = 0, heap = 0;
    bool finite = true, flat = true;
    for (std::size_t at = 0; at < text.size(); at += chunk) {
      heap = at == 40 * chunk ? heap_bytes() : heap;
      const auto logits =
          kv.decode(std::span(text).subspan(at, std::min<std::size_t>(chunk, text.size() - at)));
      finite = finite && logits.allFinite();
      const auto r = kv.kv.report();
      bytes = at == 4 * chunk ? r.bytes : bytes;
      flat = flat && (at < 4 * chunk || r.bytes == bytes);
    }
    const std::size_t heap_then = heap_bytes(), grown = heap_then - std::min(heap, heap_then);
    CAPTURE(heap, grown);
    CHECK(heap > bytes);   // it is counted at all
    CHECK(grown < 16384);  // a byte a token
    CHECK(finite);
    CHECK(flat);
    const auto r = kv.kv.report();
    CHECK(r.tokens == 20000);
    CHECK(r.slots == 96);
    CHECK(r.cells == (how == mode::repack ? 96 : 1));
    CHECK(llama_n_ctx(kv.context.get()) == 256);
  }
}

}  // namespace memory_test
