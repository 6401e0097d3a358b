// SPDX-License-Identifier: MIT
// What the adapter refuses in the engine's graphs, micro-batch by micro-batch.
#include <catch2/catch.hpp>
#include <cmath>    // INFINITY
#include <cstring>  // std::memcpy

#include "llama_cpp/files.hpp"

namespace graphs_test {

using namespace test;
using kvmeld::budget;
using kvmeld::llama::mode;
using kvmeld::llama::options;

/// Stands between llama.cpp and the adapter's callback: `hides(t, batch)` says which nodes of a
/// micro-batch the adapter does not get to see, as of a llama.cpp that calls them otherwise, and
/// may change them before they are computed.
struct intermediary {
  ggml_backend_sched_eval_callback adapter;
  void* self;
  std::function<bool(ggml_tensor*, index_t batch)> hides;
  index_t batch = 0;

  static bool on_node(ggml_tensor* t, bool ask, void* data) {
    auto& i = *static_cast<intermediary*>(data);
    return i.hides(t, i.batch) ? !ask : i.adapter(t, ask, i.self);
  }
};

/// What the adapter says behind an intermediary, and to which micro-batch; else the logits.
struct verdict {
  std::string said = "not refused";
  index_t batch = -1;
  std::vector<engine::row_major_matrix> logits;
  std::vector<double> bases;  ///< of the layers' rotations
};

verdict behind(twin& models, const evaluate::any_policy& p, const options& o,
               const std::function<bool(ggml_tensor*, index_t batch)>& hides) {
  kvmeld::llama::compressor<evaluate::any_policy> kv(models.theirs.get(), p, o);
  auto parameters = exact_parameters(256, 64);
  kv.attach(parameters);
  intermediary between{parameters.cb_eval, parameters.cb_eval_user_data, hides};
  parameters.cb_eval = intermediary::on_node;
  parameters.cb_eval_user_data = &between;
  const llama_context_ptr context(llama_init_from_model(models.theirs.get(), parameters));
  REQUIRE(context != nullptr);
  kv.bind(context.get());
  const auto text = draw_tokens(194, models.shape.vocab);
  verdict v;
  for (std::size_t at = 0; at < text.size(); ++between.batch) {
    const auto part = std::span(text).subspan(at, at < 192 ? 64 : 1);
    v.logits.push_back(decode(context.get(), part, static_cast<index_t>(at)));
    at += part.size();
    try {
      kv.check();
    } catch (const kvmeld::error& e) {
      v.said = e.what();
      v.batch = between.batch;
      break;
    }
  }
  for (index_t l = 0; l < models.shape.layers; ++l) {
    v.bases.push_back(kv.held()[l].model.rope.base());
  }
  return v;
}

/// Nodes by the beginning of their names.
auto named(const char* prefix) {
  return [=](ggml_tensor* t) { return std::string_view(t->name).starts_with(prefix); };
}

/// Those that store rows in the engine's cells.
auto rows_of(const char* cache) {
  return [=](ggml_tensor* t) {
    return t->op == GGML_OP_SET_ROWS &&
           std::string_view(kvmeld::llama::root_of(t)->name).starts_with(cache);
  };
}

using Catch::Contains;

TEST_CASE("llama.cpp: a graph with nodes of other names is refused, not misread") {
  twin models;
  // In the first graph, in a later one, in one of a single token.
  for (const index_t from : {0, 2, 3}) {
    const std::string seen = "expected " + std::to_string(64 * from) + " tokens in the engine";
    const auto said = [&](mode how, const std::string& policy, auto hidden,
                          const std::vector<budget>& limits = {{.slots = 48}}) {
      const auto v = behind(models, policy_named(policy), {.how = how, .limits = limits},
                            [&](ggml_tensor* t, index_t at) { return at >= from && hidden(t); });
      if (v.batch >= 0) {
        CHECK_THAT(v.said, Contains("another graph than the adapter knows"));
        CHECK(v.batch == from);
      }
      return v.said;
    };
    for (const mode how : {mode::repack, mode::own_attention}) {
      for (const std::string policy : {"streaming_llm", "h2o", "fold", "keepkv"}) {
        CAPTURE(from, how, policy);
        CHECK(said(how, policy, [](auto) { return false; }) == "not refused");
        CHECK_THAT(said(how, policy, named("Qcur")), Contains("for the 0 positions before them"));
        CHECK_THAT(said(how, policy, rows_of("cache_k_l")), Contains("got 'cache_v_l0'"));
        CHECK_THAT(said(how, policy, rows_of("cache_k_l1")),
                   Contains("expected the keys and values of every layer"));
        CHECK_THAT(said(how, policy, rows_of("cache_v_l1")),
                   Contains("expected the keys and values of every layer"));
        CHECK_THAT(said(how, policy, rows_of("cache_")),
                   Contains("expected the cells of the tokens before"));
        CHECK_THAT(said(how, policy, named("result_output")), Contains(seen));
        CHECK_THAT(said(how, policy, named("")), Contains(seen));
        const auto attention = [&](ggml_tensor* t) {
          return t->op == GGML_OP_FLASH_ATTN_EXT || t->op == GGML_OP_SOFT_MAX;
        };
        CHECK_THAT(said(how, policy, attention),
                   Contains("expected all nodes of layer 0's attention"));
      }
    }
    // What a policy does not need may be called anything.
    for (const std::string policy : {"h2o", "fold"}) {
      CAPTURE(from, policy);
      // Of a step h2o does not; a prompt is measured on its queries.
      const bool queries = policy == "fold" || from < 3;
      CHECK_THAT(said(mode::repack, policy, named("kq-")),
                 Contains(queries ? "expected all nodes of layer 0's attention" : "not refused"));
      CHECK_THAT(said(mode::repack, policy, named("kq-1")),
                 Contains(queries ? "expected all nodes of layer 1's attention" : "not refused"));
    }
    // Where a head is shorter than another, it has cells to hide.
    if (from > 0) {
      CHECK_THAT(said(mode::repack, "h2o", named("kq-1"), {{.slots = 48}, {.slots = 40}}),
                 Contains("expected all nodes of layer 1's attention"));
    }
  }
}

TEST_CASE("llama.cpp: attention that is no softmax over all tokens is refused by its numbers") {
  twin models;
  for (const mode how : {mode::repack, mode::own_attention}) {
    const auto said = [&](auto change) {
      const auto v = behind(
          models, policy_named("h2o"), {.how = how, .limits = {{.slots = 48}}},
          [&](ggml_tensor* t, index_t batch) {
            if ((t->op == GGML_OP_SOFT_MAX || t->op == GGML_OP_FLASH_ATTN_EXT) && batch == 1) {
              change(t, t->src[how == mode::repack ? 1 : 3]);
            }
            return false;
          });
      CHECK(v.batch == 1);
      return v.said;
    };
    CHECK_THAT(said([](ggml_tensor* t, ggml_tensor*) {
                 const float bias = 8;
                 std::memcpy(&t->op_params[1], &bias, sizeof bias);
               }),
               Contains("expected layer 0 without ALiBi (a bias of 0), got one of 8"));
    // The last of 64 queries of the first cell, as where a window has left it behind.
    CHECK_THAT(said([](ggml_tensor*, ggml_tensor* mask) {
                 auto* const row = static_cast<char*>(mask->data) + 63 * mask->nb[1];
                 if (mask->type == GGML_TYPE_F16) {
                   *reinterpret_cast<ggml_fp16_t*>(row) = ggml_fp32_to_fp16(-INFINITY);
                 } else {
                   *reinterpret_cast<float*>(row) = -INFINITY;
                 }
               }),
               Contains("expected layer 0 to attend to every token alike, got -inf in its mask"));
  }
}

TEST_CASE("llama.cpp: a layer that is turned by another base is compressed by that") {
  twin models;
  const float known = static_cast<float>(models.shape.rope.base()), other = 500'000;
  // Layer 1's keys, of the first micro-batch and all others.
  const auto turned_by = [](float base) {
    return [base](ggml_tensor* t, index_t) {
      if (t->op == GGML_OP_ROPE && std::string_view(t->name).starts_with("Kcur-1")) {
        std::memcpy(&t->op_params[5], &base, sizeof base);
      }
      return false;
    };
  };
  for (const mode how : {mode::repack, mode::own_attention}) {
    const options o{.how = how, .limits = {{.slots = 48}}};
    for (const auto& p : {by_slots(), policy_named("fold"), policy_named("h2o")}) {
      CAPTURE(how, p.name());
      const auto as_ever = behind(models, p, o, turned_by(known)),
                 otherwise = behind(models, p, o, turned_by(other));
      CHECK(as_ever.said == "not refused");
      CHECK(as_ever.bases == std::vector<double>{known, known});
      CHECK(otherwise.said == "not refused");
      CHECK(otherwise.bases == std::vector<double>{known, other});
      CHECK(apart(as_ever.logits, otherwise.logits) > 0.01F);
    }
  }
}

TEST_CASE("llama.cpp: a batch whose tokens attend to later ones is refused with own attention") {
  twin models;
  const auto text = draw_tokens(40, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(models.theirs.get(), policy_named("h2o"),
                        {.how = how, .limits = {{.slots = 96}}}, exact_parameters(256, 64));
    (void)kv.decode(std::span(text).first(20));
    llama_set_causal_attn(kv.context.get(), false);  // as for the tokens of an image
    const auto image = [&] { (void)kv.decode(std::span(text).subspan(20)); };
    if (how == mode::repack) {
      CHECK_NOTHROW(image());
    } else {
      CHECK_THROWS_WITH(image(), Contains("expected causal attention in layer 0"));
    }
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
    const options o{.how = how, .limits = {{.slots = 96}}};
    compressed_llama alone(models.theirs.get(), policy_named("h2o"), o, parameters),
        kv(models.theirs.get(), policy_named("h2o"), o, parameters);
    const auto memory = llama_get_memory(kv.context.get());
    const auto refused = [&](const std::string& which, llama_seq_id sequence, index_t at) {
      const auto before = kv.kv.report();
      int code = 0;
      decode(kv.context.get(), part(4), at, &code, sequence);
      CHECK(code == 2);
      CHECK_THROWS_WITH(
          kv.kv.check(),
          Catch::Contains("expected tokens of one sequence, got those of sequences " + which));
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

}  // namespace graphs_test
