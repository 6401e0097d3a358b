// What the adapter refuses in the engine's graphs, micro-batch by micro-batch.
#include <catch2/catch.hpp>

#include "support/llama_files.hpp"

namespace {

using namespace test;
using kvfold::llama::mode;
using kvfold::llama::options;

/// The adapter's callback, from which nodes are hidden: a llama.cpp that calls them otherwise.
struct renamed {
  ggml_backend_sched_eval_callback known;
  void* adapter;
  std::function<bool(ggml_tensor*)> hidden;

  static bool on_node(ggml_tensor* t, bool ask, void* self) {
    auto& r = *static_cast<renamed*>(self);
    return r.hidden(t) ? !ask : r.known(t, ask, r.adapter);
  }
};

}  // namespace

TEST_CASE("llama.cpp: a graph with nodes of other names is refused, not misread") {
  twin models;
  const auto text = draw_tokens(64, models.shape.vocab);
  const auto said = [&](mode how, const std::string& policy, auto hidden) -> std::string {
    kvfold::llama::compressor<evaluate::any_policy> kv(models.theirs.get(), policy_named(policy),
                                                       {.how = how, .limits = {{.target = 48}}});
    auto p = exact_parameters(256, 64);
    kv.attach(p);
    renamed other{p.cb_eval, p.cb_eval_user_data, hidden};
    p.cb_eval = renamed::on_node;
    p.cb_eval_user_data = &other;
    const llama_context_ptr context(llama_init_from_model(models.theirs.get(), p));
    REQUIRE(context != nullptr);
    kv.bind(context.get());
    decode(context.get(), text, 0);
    try {
      kv.check();
    } catch (const kvfold::invalid_argument& e) {
      CHECK_THAT(e.what(), Catch::Contains("another graph than the adapter knows"));
      return e.what();
    }
    return "not refused";
  };
  const auto named = [](const char* prefix) {
    return [=](ggml_tensor* t) { return std::string_view(t->name).starts_with(prefix); };
  };
  const auto rows_of = [](const char* cache) {
    return [=](ggml_tensor* t) {
      return t->op == GGML_OP_SET_ROWS &&
             std::string_view(kvfold::llama::root_of(t)->name).starts_with(cache);
    };
  };
  using Catch::Contains;
  for (const mode how : {mode::repack, mode::own_attention}) {
    for (const std::string policy : {"streaming_llm", "h2o", "fold", "keepkv"}) {
      CAPTURE(policy);
      CHECK(said(how, policy, [](auto) { return false; }) == "not refused");
      CHECK_THAT(said(how, policy, named("Qcur")), Contains("behind 0 positions"));
      CHECK_THAT(said(how, policy, rows_of("cache_k_l")), Contains("'cache_v_l0' came"));
      CHECK_THAT(said(how, policy, rows_of("cache_k_l1")), Contains("some did not come"));
      CHECK_THAT(said(how, policy, rows_of("cache_v_l1")), Contains("some did not come"));
      CHECK_THAT(said(how, policy, rows_of("cache_")), Contains("before the cells"));
      CHECK_THAT(said(how, policy, named("result_output")), Contains("0 tokens were seen"));
      CHECK_THAT(said(how, policy, named("")), Contains("0 tokens were seen"));
      const auto attention = [&](ggml_tensor* t) {
        return t->op == GGML_OP_FLASH_ATTN_EXT || t->op == GGML_OP_SOFT_MAX;
      };
      CHECK_THAT(said(how, policy, attention), Contains("of layer 0's attention expected"));
    }
  }
  // What a policy does not need may be called anything.
  for (const std::string policy : {"h2o", "fold"}) {
    const bool queries = policy == "fold";
    CHECK_THAT(said(mode::repack, policy, named("kq-")),
               Contains(queries ? "of layer 0's attention expected" : "not refused"));
    CHECK_THAT(said(mode::repack, policy, named("kq-1")),
               Contains(queries ? "of layer 1's attention expected" : "not refused"));
  }
}

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
