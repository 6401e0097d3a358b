// SPDX-License-Identifier: MIT
// Several sequences in one context: each is compressed as it is alone.
#include <catch2/catch.hpp>

#include "llama_cpp/announced.hpp"

namespace sequences_test {

using namespace test;
using Catch::Contains;

constexpr index_t steps = 12;

/// Batches of three sequences: prompts of their own lengths, the third's beside steps of the
/// first's, and then a step of each in every batch.
struct schedule {
  std::vector<std::vector<int>> texts;
  std::vector<std::vector<token_at>> batches;

  explicit schedule(index_t vocab) {
    const index_t lengths[] = {100, 64, 40};
    index_t next[] = {0, 0, 0};
    for (unsigned s = 0; s < 3; ++s) {
      texts.push_back(draw_tokens(lengths[s] + 2 * steps, vocab, 3 + s));
    }
    const auto take = [&](llama_seq_id s, index_t n) {
      const index_t first = std::exchange(next[s], next[s] + n);
      return tokens_of(texts[static_cast<std::size_t>(s)], first, n, s);
    };
    const auto join = [&](std::vector<std::vector<token_at>> parts) {
      batches.emplace_back();
      for (const auto& p : parts) {
        batches.back().insert(batches.back().end(), p.begin(), p.end());
      }
    };
    join({take(0, 60)}), join({take(0, 40)});
    join({take(0, 1)}), join({take(1, 64)});
    join({take(0, 1), take(2, 40), take(1, 1)});
    for (index_t i = 0; i < steps; ++i) {
      join({take(2, 1), take(0, 1), take(1, 1)});
    }
  }
};

/// Logits of one sequence's tokens, in their order.
std::vector<engine::row_vector> rows_of(const std::vector<token_at>& batch,
                                        const engine::row_major_matrix& logits, llama_seq_id s) {
  std::vector<engine::row_vector> rows;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].sequence == s) {
      rows.emplace_back(logits.row(static_cast<Eigen::Index>(i)));
    }
  }
  return rows;
}

TEST_CASE("llama.cpp: sequences in one batch are compressed as each is alone") {
  const twin models;
  const schedule plan(models.shape.vocab);
  for (const std::string& name : every_policy_name()) {
    CAPTURE(name);
    const kvmeld::llama::options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
    announced_llama all(models.theirs.get(), policy_named(name), o, parameters_for(3));
    std::vector<std::unique_ptr<announced_llama>> alone;
    for (int s = 0; s < 3; ++s) {
      alone.push_back(std::make_unique<announced_llama>(models.theirs.get(), policy_named(name), o,
                                                        parameters_for(1)));
    }
    float most = 0;
    for (const auto& batch : plan.batches) {
      const auto logits = all.decode(batch);
      for (llama_seq_id s = 0; s < 3; ++s) {
        const auto got = rows_of(batch, logits, s);
        std::vector<token_at> own;
        for (token_at t : batch) {
          if (t.sequence == s) {
            t.sequence = 0;
            own.push_back(t);
          }
        }
        if (own.empty()) {
          continue;
        }
        const auto wanted = alone[static_cast<std::size_t>(s)]->decode(own);
        for (std::size_t i = 0; i < got.size(); ++i) {
          most = std::max(
              most, (got[i] - wanted.row(static_cast<Eigen::Index>(i))).cwiseAbs().maxCoeff());
        }
      }
    }
    CAPTURE(most);
    CHECK(most < 1e-3F);
    std::int64_t tokens = 0;
    std::size_t bytes = 0;
    for (index_t s = 0; s < 3; ++s) {
      auto& one = *alone[static_cast<std::size_t>(s)];
      for (index_t l = 0; l < 2; ++l) {
        for (index_t h = 0; h < 2; ++h) {
          CHECK(all.positions(l, h, s) == one.positions(l, h));
        }
      }
      tokens += one.kv.report().tokens;
      bytes += one.kv.report().bytes;
    }
    CHECK(all.kv.report().tokens == tokens);
    CHECK(all.kv.report().bytes == bytes);
    CHECK(all.kv.report().cells == 3);
  }
}

TEST_CASE("llama.cpp: sequences of every family give llama.cpp's logits before any eviction") {
  for (const family& f : families()) {
    CAPTURE(f.arch, f.scaling);
    const auto model = random_model(f);
    const schedule plan(family::vocab);
    auto p = parameters_for(3);
    announced_llama kv(model.get(), policy_named("h2o"),
                       {.how = mode::own_attention, .limits = {{.slots = 150}}}, p);
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const llama_context_ptr plain(llama_init_from_model(model.get(), p));
    REQUIRE(plain != nullptr);
    float most = 0, size = 0;
    for (const auto& batch : plan.batches) {
      int code = 0;
      const auto wanted = decode(plain.get(), batch, &code);
      REQUIRE(code == 0);
      most = std::max(most, difference(kv.decode(batch), wanted));
      size = std::max(size, wanted.cwiseAbs().maxCoeff());
    }
    CHECK(size > 1);
    CHECK(most < (f.window > 0 ? 1e-2F : 1e-4F) * size);
  }
}

TEST_CASE("llama.cpp: a sequence ends its prompt, is removed and begins again without the others") {
  const twin models;
  const schedule plan(models.shape.vocab);
  const auto prompt = [&](std::size_t s, index_t n) {
    return tokens_of(plan.texts[s], 0, n, static_cast<llama_seq_id>(s));
  };
  const kvmeld::llama::options o{
      .how = mode::own_attention, .limits = {kvmeld::budget::shared(24)}, .capacity = 256};
  announced_llama kv(models.theirs.get(), policy_named("fold"), o, parameters_for(3));
  const auto slots = [&](index_t s) {
    index_t sum = 0;
    for (index_t l = 0; l < 2; ++l) {
      for (index_t h = 0; h < 2; ++h) {
        sum += kv.kv.held().head(l, h, s).length();
      }
    }
    return sum;
  };
  kv.decode(prompt(0, 60)), kv.decode(prompt(1, 40));
  kv.kv.end_prompt(0);
  CHECK((slots(0) == 4 * 24 && slots(1) == 4 * 40));
  kv.decode(std::vector<token_at>{{1, 40, 5}, {0, 60, 6}});
  CHECK((slots(0) <= 4 * 24 && slots(1) == 4 * 41));
  kv.kv.end_prompt(1);
  CHECK(slots(1) == 4 * 24);
  const auto kept = kv.positions(1, 1, 1);
  llama_memory_seq_rm(kv.memory(), 0, -1, -1);
  kv.decode(prompt(2, 30));  // 0 is gone, and its memory with it
  CHECK((slots(0) == 0 && slots(2) == 4 * 30));
  CHECK(kv.kv.report().tokens == 41 + 30);
  kv.decode(prompt(0, 20));
  CHECK(slots(0) == 4 * 20);
  CHECK(kv.positions(1, 1, 1) == kept);
}

TEST_CASE("llama.cpp: batches that cannot be announced are refused, and change nothing") {
  const twin models;
  const auto text = draw_tokens(80, models.shape.vocab);
  const kvmeld::llama::options o{.how = mode::own_attention, .limits = {{.slots = 48}}};
  announced_llama kv(models.theirs.get(), policy_named("h2o"), o, parameters_for(2));
  kv.decode(tokens_of(text, 0, 64));
  const auto refused = [&](announced_llama& to, std::vector<token_at> tokens, const char* why,
                           bool draft = false) {
    const auto before = to.kv.report();
    CHECK_THROWS_WITH(to.decode(tokens, draft), Contains(why));
    CHECK((to.kv.report().tokens == before.tokens && to.kv.report().bytes == before.bytes));
  };
  refused(kv, {{2, 0, 5}}, "announce: expected a sequence of 0 to 1 (n_seq_max when attached)");
  refused(kv, tokens_of(std::vector<int>(65, 1), 0, 65, 1), "expected a draft of at most 64 tokens",
          true);
  refused(kv, {{1, 3, 5}}, "expected sequence 1 at consecutive positions, next 0, got 3");
  llama_memory_seq_rm(kv.memory(), 1, -1, -1);
  kv.decode(std::vector<token_at>{{0, 64, 5}, {1, 0, 6}});
  announced_llama repack(models.theirs.get(), policy_named("h2o"), {.limits = {{.slots = 48}}},
                         parameters_for(2));
  refused(repack, {{0, 0, 5}}, "announce: expected mode own_attention, got repack");
  announced_llama prompts(models.theirs.get(), policy_named("attention_matching:recent=4"), o,
                          parameters_for(1));
  refused(prompts, {{0, 0, 5}}, "which compresses prompts only", true);
}

}  // namespace sequences_test
