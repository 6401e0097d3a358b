// SPDX-License-Identifier: MIT
// Sequences copied, saved and loaded: what they write then is what they would have written.
#include <catch2/catch.hpp>
#include <cstring>  // std::memcpy
#include <sstream>

#include "llama_cpp/announced.hpp"

namespace states_test {

using namespace test;
using Catch::Contains;
using kvmeld::llama::options;

constexpr index_t length = 100;

void expect_same_heads(announced_llama& a, index_t of_a, announced_llama& b, index_t of_b) {
  for (index_t l = 0; a.kv.held().holds(l) && l < 2; ++l) {
    for (index_t h = 0; h < 2; ++h) {
      CHECK(a.positions(l, h, of_a) == b.positions(l, h, of_b));
    }
  }
}

/// A sequence that has read a prompt and made some steps.
void begin(announced_llama& kv, std::span<const int> text) {
  kv.decode(tokens_of(text, 0, 60)), kv.decode(tokens_of(text, 60, length - 65));
  for (index_t at = length - 5; at < length; ++at) {
    kv.decode(tokens_of(text, at, 1));
  }
}

TEST_CASE("llama.cpp: a copied sequence goes on as the first, and apart from it") {
  const twin models;
  const auto text = draw_tokens(length + 20, models.shape.vocab), other = draw_tokens(30, 2048, 9);
  for (const std::string& name : every_decoding_policy()) {
    for (const bool compressed : {false, true}) {
      CAPTURE(name, compressed);
      const options o{.how = mode::own_attention,
                      .limits = {{.slots = compressed ? 48 : 150}},
                      .untouched = {0}};
      announced_llama kv(models.theirs.get(), policy_named(name), o, parameters_for(3)),
          alone(models.theirs.get(), policy_named(name), o, parameters_for(1));
      begin(kv, text), begin(alone, text);
      kv.kv.copy(0, 2);
      expect_same_heads(kv, 2, alone, 0);
      float most = 0;
      for (index_t i = 0; i < 20; ++i) {
        // The first goes on with another text.
        const auto logits = kv.decode(
            std::vector<token_at>{{0, length + i, other[static_cast<std::size_t>(i)]},
                                  {2, length + i, text[static_cast<std::size_t>(length + i)]}});
        const auto wanted = alone.decode(tokens_of(text, length + i, 1));
        most = std::max(most, difference(logits.bottomRows(1), wanted));
      }
      CHECK(most < 1e-3F);
      expect_same_heads(kv, 2, alone, 0);
    }
  }
}

TEST_CASE("llama.cpp: a saved sequence is loaded into a new context, and writes the same") {
  const twin models;
  const auto text = draw_tokens(length + 20, models.shape.vocab);
  for (const ggml_type rows : {GGML_TYPE_F32, GGML_TYPE_F16}) {
    for (const std::string& name : every_decoding_policy()) {
      CAPTURE(name, rows);
      const options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
      auto p = parameters_for(2);
      p.type_k = p.type_v = rows;
      announced_llama kv(models.theirs.get(), policy_named(name), o, p);
      begin(kv, text);
      std::stringstream file;
      kv.kv.save(file);
      announced_llama next(models.theirs.get(), policy_named(name), o, p);
      next.kv.load(file, 1);
      expect_same_heads(next, 1, kv, 0);
      bool same = true;
      for (index_t i = 0; i < 20; ++i) {
        const auto wanted = kv.decode(tokens_of(text, length + i, 1));
        const auto got = next.decode(
            std::vector<token_at>{{1, length + i, text[static_cast<std::size_t>(length + i)]}});
        same = same && difference(got, wanted) == 0;
      }
      CHECK(same);
      expect_same_heads(next, 1, kv, 0);
      CHECK(next.kv.report().bytes == kv.kv.report().bytes);
    }
  }
}

TEST_CASE("llama.cpp: saved sequences of every family go on in a new context") {
  for (const family& f : families()) {
    CAPTURE(f.arch, f.scaling);
    const auto model = random_model(f);
    const auto text = draw_tokens(length + 20, family::vocab);
    const options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
    announced_llama kv(model.get(), policy_named("h2o"), o, parameters_for(1)),
        next(model.get(), policy_named("h2o"), o, parameters_for(1));
    begin(kv, text);
    std::stringstream file;
    kv.kv.save(file);
    next.kv.load(file);
    float most = 0, size = 0;
    for (index_t i = 0; i < 20; ++i) {
      const auto one = tokens_of(text, length + i, 1);
      const auto wanted = kv.decode(one);
      most = std::max(most, difference(next.decode(one), wanted));
      size = std::max(size, wanted.cwiseAbs().maxCoeff());
    }
    // Windowed layers' rows lie in other cells: the engine sums halves in another order.
    CHECK(most < (f.window > 0 ? 1e-2F : 1e-6F) * size);
  }
}

TEST_CASE("llama.cpp: single tokens under a policy for prompts alone are copied and saved too") {
  const twin models;
  const auto text = draw_tokens(length, models.shape.vocab);
  const options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
  announced_llama kv(models.theirs.get(), policy_named("attention_matching:recent=4"), o,
                     parameters_for(3));
  kv.decode(tokens_of(text, 0, 60)), kv.decode(tokens_of(text, 60, 1));
  kv.kv.copy(0, 1);
  std::stringstream file;
  kv.kv.save(file), kv.kv.load(file, 2);
  std::vector<token_at> all;
  for (llama_seq_id s = 0; s < 3; ++s) {
    all.push_back({s, 61, text[61]});
  }
  const auto steps = kv.decode(all);
  CHECK((difference(steps.row(1), steps.row(0)) < 1e-4F &&
         difference(steps.row(2), steps.row(0)) < 1e-4F));
  for (llama_seq_id s = 0; s < 3; ++s) {
    kv.decode(tokens_of(text, 62, 30, s));  // its end compresses what was kept for it
    CHECK(kv.kv.held().head(1, 1, s).length() == 48);
    CHECK(kv.positions(1, 1, s) == kv.positions(1, 1, 0));
  }
}

TEST_CASE("llama.cpp: what cannot be copied, saved or loaded is refused, and changes nothing") {
  const twin models;
  const auto text = draw_tokens(length, models.shape.vocab);
  const options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
  announced_llama kv(models.theirs.get(), policy_named("h2o"), o, parameters_for(2));
  std::stringstream file;
  CHECK_THROWS_WITH(kv.kv.save(file), Contains("save: expected a sequence with tokens"));
  begin(kv, text);
  kv.kv.save(file);
  const std::string saved = file.str();
  const auto load = [&](announced_llama& to, const std::string& bytes, llama_seq_id s) {
    std::istringstream in(bytes);
    to.kv.load(in, s);
  };
  CHECK_THROWS_WITH(load(kv, saved, 0), Contains("load: expected a sequence without tokens"));
  CHECK_THROWS_WITH(load(kv, saved, 2), Contains("load: expected a sequence of 0 to 1"));
  CHECK_THROWS_WITH(kv.kv.copy(0, 2), Contains("copy: expected a sequence of 0 to 1"));
  // Every byte counts, and the sequence stays empty.
  auto before = kv.kv.report();
  for (std::size_t at = 0; at < saved.size(); at += at < 64 ? 1 : 997) {
    std::string changed = saved;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    CHECK_THROWS_AS(load(kv, changed, 1), kvmeld::error);
    CHECK_THROWS_AS(load(kv, saved.substr(0, at), 1), kvmeld::error);
  }
  const auto unchanged = [&] {
    const auto now = kv.kv.report();
    CHECK((now.tokens == before.tokens && now.bytes == before.bytes));
    // But for pages in which one head's memory ends and another's begins.
    CHECK(now.reserved_bytes <= before.reserved_bytes + 8 * 4096);
    CHECK(llama_memory_seq_pos_max(kv.memory(), 1) == -1);
  };
  unchanged();
  // llama.cpp's state of 100 tokens before the heads of 101.
  kv.decode(std::vector<token_at>{{0, length, 5}});
  std::stringstream longer;
  kv.kv.save(longer);
  const auto state_of = [](const std::string& bytes) {
    // Two layers without sinks, of 8 rotated pairs, come before it, a CRC-32 after it.
    constexpr std::size_t layers = 2 * (12 + 8 + 8 * 8);
    std::uint64_t size = 0;
    std::memcpy(&size, bytes.data() + 8 + layers, sizeof size);
    return 8 + layers + 8 + static_cast<std::size_t>(size) + 4;
  };
  before = kv.kv.report();
  CHECK_THROWS_WITH(
      load(kv, saved.substr(0, state_of(saved)) + longer.str().substr(state_of(longer.str())), 1),
      Contains("load: expected heads of 100 tokens (llama.cpp's state), got 101"));
  unchanged();
  load(kv, saved, 1);
  announced_llama other(models.theirs.get(), policy_named("tova"), o, parameters_for(2));
  const auto empty = other.kv.report();
  const float scale = other.kv.held()[0].model.scale;
  CHECK_THROWS_WITH(load(other, saved, 0), Contains("load: expected policy tova, got h2o"));
  CHECK((other.kv.report().reserved_bytes == empty.reserved_bytes &&
         other.kv.held()[0].model.scale == scale));
  kvmeld::llama::compressor unbound(models.theirs.get(), policy_named("h2o"), o);
  CHECK_THROWS_WITH(unbound.draft_room(), Contains("draft_room: expected bind(context) before it"));
  std::istringstream in(saved);
  CHECK_THROWS_WITH(unbound.load(in), Contains("load: expected bind(context) before it"));
  announced_llama few(models.theirs.get(), policy_named("h2o"),
                      {.how = mode::own_attention, .limits = {{.slots = 40}}}, parameters_for(2));
  CHECK_THROWS_AS(load(few, saved, 0), kvmeld::error);
  announced_llama whole(models.theirs.get(), policy_named("h2o"),
                        {.how = mode::own_attention, .limits = {{.slots = 48}}, .untouched = {0}},
                        parameters_for(1));
  CHECK_THROWS_WITH(whole.kv.save(file),
                    Contains("save: expected compressed layers alone, got 1 that keep all"));
  announced_llama repack(models.theirs.get(), policy_named("h2o"), {.limits = {{.slots = 48}}},
                         parameters_for(2));
  CHECK_THROWS_WITH(repack.kv.save(file), Contains("save: expected mode own_attention"));
  CHECK_THROWS_WITH(repack.kv.copy(0, 1), Contains("copy: expected mode own_attention"));
  CHECK_THROWS_WITH(load(repack, saved, 0), Contains("load: expected mode own_attention"));
  // The engine's own seq_cp tells the adapter nothing.
  llama_memory_seq_rm(kv.memory(), 1, -1, -1);
  llama_memory_seq_cp(kv.memory(), 0, 1, -1, -1);
  announced_llama fresh(models.theirs.get(), policy_named("h2o"), o, parameters_for(2));
  fresh.decode(tokens_of(text, 0, 30));
  llama_memory_seq_cp(fresh.memory(), 0, 1, -1, -1);
  CHECK_THROWS_WITH(fresh.decode(std::vector<token_at>{{1, 30, 5}}),
                    Contains("expected sequence 1 at consecutive positions, next 0, got 30 (copy "
                             "begins one with another's tokens)"));
  // In the middle of a prompt, or of a draft.
  announced_llama open(models.theirs.get(), policy_named("fold"),
                       {.how = mode::own_attention, .limits = {kvmeld::budget::shared(24)}},
                       parameters_for(2));
  open.decode(tokens_of(text, 0, 30));
  CHECK_THROWS_WITH(open.kv.copy(0, 1), Contains("copy: expected end_prompt first"));
  CHECK_THROWS_WITH(open.kv.save(file), Contains("save: expected end_prompt first"));
  open.kv.end_prompt();
  open.decode(tokens_of(text, 30, 2), true);
  CHECK_THROWS_WITH(open.kv.copy(0, 1), Contains("copy: expected accept first"));
  CHECK_THROWS_WITH(open.kv.save(file), Contains("save: expected accept first"));
  CHECK_THROWS_WITH(open.kv.draft_room(), Contains("draft_room: expected accept first"));
}

}  // namespace states_test
