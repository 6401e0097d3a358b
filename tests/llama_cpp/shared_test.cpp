// SPDX-License-Identifier: MIT
// Budgets that the heads of a model share: the adapter keeps the slots that the library keeps.
#include <catch2/catch.hpp>

#include "llama_cpp/files.hpp"

namespace shared_test {

using namespace test;
using kvmeld::budget;
using kvmeld::llama::mode;

constexpr index_t chunk = 64, slots = 48;

/// Positions, from the lowest on: slots have no order.
std::vector<index_t> positions_of(const kvmeld::head_ref& head) {
  std::vector<index_t> all;
  for (index_t s = 0; s < head.length(); ++s) {
    all.push_back(head.position(s));
  }
  std::ranges::sort(all);
  return all;
}

struct kept_slots {
  index_t total = 0, longest = 0, apart = 0;  ///< of all heads; heads that keep others than ours
};

kept_slots compare(compressed_llama& kv, chunked_engine& ours, index_t position) {
  kept_slots kept;
  for (index_t l = 0; l < 2; ++l) {
    for (index_t h = 0; h < 2; ++h) {
      const auto head = kv.kv.held().head(l, h);
      CHECK(head.next_position() == position);
      kept.total += head.length();
      kept.longest = std::max(kept.longest, head.length());
      kept.apart += positions_of(head) == positions_of(ours.head(l, h)) ? 0 : 1;
    }
  }
  return kept;
}

TEST_CASE("llama.cpp: heads that share a budget keep the slots of the library's compressor") {
  const twin models;
  const auto text = draw_tokens(5 * chunk + 24, models.shape.vocab);
  const auto prompt = std::span(text).first(5 * chunk);
  const auto whole = full_logits(models.ours, text);
  for (const std::string name : {"fold", "h2o", "snapkv:window=8"}) {
    for (const mode how : {mode::repack, mode::own_attention}) {
      CAPTURE(name, how);
      const auto p = policy_named(name);
      chunked_engine ours(models.ours, p, {budget::shared(slots)}, 512);
      compressed_llama kv(models.theirs.get(), p,
                          {.how = how, .limits = {budget::shared(slots)}, .capacity = 512},
                          exact_parameters(512, chunk));
      for (std::size_t at = 0; at < prompt.size(); at += chunk) {
        ours.decode(prompt.subspan(at, chunk));
        // Nothing is evicted before the prompt ends.
        CHECK(difference(kv.decode(prompt.subspan(at, chunk)),
                         whole.middleRows(static_cast<Eigen::Index>(at), chunk)) < 1e-3F);
      }
      CHECK(compare(kv, ours, 5 * chunk).total == 4 * 5 * chunk);
      ours.end_prompt();
      kv.kv.end_prompt();
      const auto kept = compare(kv, ours, 5 * chunk);
      CHECK(kept.total == 4 * slots);
      CHECK(kept.longest > slots);
      CHECK(kept.apart == 0);
      const auto r = kv.kv.report();
      CHECK(r.slots == kept.longest);
      CHECK(r.cells == (how == mode::repack ? kept.longest : 1));
      kv.kv.end_prompt();  // there is none any more
      CHECK(compare(kv, ours, 5 * chunk).total == 4 * slots);
      for (std::size_t at = prompt.size(); at < text.size(); ++at) {
        const auto token = std::span(text).subspan(at, 1);
        const auto wanted = ours.decode(token);
        CHECK(difference(kv.decode(token), wanted) < 1e-3F);
      }
      const auto then = compare(kv, ours, 5 * chunk + 24);
      CHECK(then.total <= 4 * slots);
      CHECK(then.apart == 0);
    }
  }
}

TEST_CASE("llama.cpp: layers that are left alone take no part in a shared budget") {
  const twin models;
  const auto text = draw_tokens(4 * chunk, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    compressed_llama kv(
        models.theirs.get(), policy_named("fold"),
        {.how = how, .limits = {budget::shared(slots)}, .untouched = {0}, .capacity = 512},
        exact_parameters(512, chunk));
    run(kv, text);
    kv.kv.end_prompt();
    index_t kept = 0;
    for (index_t h = 0; h < 2; ++h) {
      CHECK(kv.kv.held().head(0, h).length() == 4 * chunk);
      CHECK(kv.kv.held().state(0, h) == nullptr);
      kept += kv.kv.held().head(1, h).length();
    }
    CHECK(kept == 2 * slots);
  }
}

TEST_CASE("llama.cpp: budgets that cannot be shared are refused when the adapter is made") {
  const twin models;
  const auto made = [&](const std::string& name, std::vector<budget> limits) {
    kvmeld::llama::compressor<evaluate::any_policy>(models.theirs.get(), policy_named(name),
                                                    {.limits = std::move(limits)});
  };
  using Catch::Contains;
  CHECK_NOTHROW(made("fold", {budget::shared(slots)}));
  CHECK_THROWS_WITH(made("streaming_llm", {budget::shared(slots)}),
                    Contains("expected a policy with a score per slot for shared budgets"));
  CHECK_THROWS_WITH(made("fold", {budget::shared(slots), budget::shared(slots)}),
                    Contains("expected one shared budget for all heads"));
  CHECK_THROWS_WITH(made("fold", {budget::shared(3)}), Contains("fold: expected at least"));
}

}  // namespace shared_test
