// What the adapter refuses in the engine's graphs, micro-batch by micro-batch.
#include <catch2/catch.hpp>

#include "support/llama_files.hpp"

namespace {

using namespace test;
using kvfold::llama::mode;
using kvfold::llama::options;

}  // namespace

TEST_CASE("llama.cpp: a second sequence is refused, and the first goes on") {
  twin models;
  const auto text = draw_tokens(320, models.shape.vocab);
  const auto part = [&](std::size_t i) { return std::span(text).subspan(64 * i, 64); };
  for (const mode how : {mode::repack, mode::own_attention}) {
    auto parameters = exact_parameters(512, 64);
    parameters.n_seq_max = 3;
    parameters.kv_unified = true;
    const options o{.how = how, .limits = {{.target = 96}}};
    compressed_llama alone(models.theirs.get(), policy_named("h2o"), o, parameters),
        kv(models.theirs.get(), policy_named("h2o"), o, parameters);
    const auto memory = llama_get_memory(kv.context.get());
    const auto refused = [&](const std::string& which, llama_seq_id sequence, index_t at) {
      const auto before = kv.kv.report();
      int code = 0;
      decode(kv.context.get(), part(4), at, &code, sequence);
      CHECK(code == 2);
      CHECK_THROWS_WITH(kv.kv.check(),
                        Catch::Contains("one sequence expected, of sequences " + which + " came"));
      const auto after = kv.kv.report();
      CHECK((after.tokens == before.tokens && after.cells == before.cells));
      CHECK((after.slots == before.slots && after.bytes == before.bytes));
    };
    const auto same = [&](std::size_t i) {  // in other cells: other sums
      CHECK(difference(kv.decode(part(i)), alone.decode(part(i))) < 1e-4F);
    };
    same(0), same(1);
    refused("0 and 1", 1, 0);
    refused("0 and 2", 2, 0);
    same(2);
    // The first one's cells, shared.
    llama_memory_seq_cp(memory, 0, 2, -1, -1);
    refused("0 and 2", 0, 192);
    llama_memory_seq_rm(memory, 2, -1, -1);
    same(3);
    // One sequence, whichever.
    llama_memory_clear(memory, true);
    int code = 0;
    decode(kv.context.get(), part(0), 0, &code, 1);
    CHECK(code == 0);
    kv.kv.check();
    CHECK(kv.kv.report().tokens == 64);
  }
}
