// SPDX-License-Identifier: MIT
/// Needle cases of which not all fit in memory.
#include <catch2/catch.hpp>
#include <filesystem>
#include <utility>  // std::pair

#include "engine/model.hpp"
#include "evaluate/prepare.hpp"
#include "support/paths.hpp"
#include "support/tiny_model.hpp"

namespace case_batches_test {

TEST_CASE("so many needle cases are held at once as their keys, values and queries take memory") {
  const test::tiny_model model;
  auto o = model.options({"--cases", "40", "--policies", "h2o,fold"});
  engine::config shape;
  shape.layers = 2, shape.heads = 2, shape.kv_heads = 1, shape.dim = 8;
  const auto todo = evaluate::make_plan(o, 3000, shape);
  // Two readings: 256 own queries and 256 of lookahead; keys and values of 96 tokens twice.
  const double bytes = 4.0 * 2 * 8 * (2 * 2 * 96 + 2 * 2 * (256 + 256));
  const auto held = [&](double cases) {
    o.memory = cases * bytes / (1 << 30);
    return evaluate::cases_at_once(o, todo, shape);
  };
  CHECK(held(0.2) == 1);
  CHECK(held(5.1) == 5);
  CHECK(held(5.9) == 5);
  CHECK(held(31.9) == 24);  // whole rounds of those that are decoded side by side
  CHECK(held(40.1) == 40);
  CHECK(held(4000) == 40);
}

TEST_CASE("needle cases in batches are answered as all at once, and heads are looked at in all") {
  const std::filesystem::path models = paths::models();
  const auto loaded = engine::model::load(models / "kvmeld-2m");
  const auto text = loaded.tokens.encode(engine::read_file(models / "held-out.txt"));
  const test::tiny_model files;  // of the other arguments
  auto o = files.options(
      {"--prompt", "256", "--cases", "11", "--policies", "full_cache,snapkv+ada_kv,streaming_llm",
       "--needle", " The secret code of {key} is {value}. ", "--question",
       "\\nQuestion: what is the secret code of {key}? Answer:", "--budgets", "128"});
  std::ostringstream err;
  evaluate::progress bar(err, false);
  const evaluate::workers on(1, bar);
  const auto needles = evaluate::draw_needles(o, loaded.tokens, text);
  const auto recall = [&](double memory) {
    o.memory = memory;
    auto todo =
        evaluate::make_plan(o, static_cast<kvmeld::index_t>(text.size()), loaded.network.shape());
    evaluate::dataset m;
    auto asked = evaluate::read_cases(m, o, todo, loaded.network, loaded.tokens, needles, on, bar);
    CHECK(m.looking.size() == needles.size());
    std::size_t i = 0;
    for (const auto& g : todo.groups) {
      for (const auto& e : g.entries) {
        asked[i].after +=
            evaluate::needle(e.chosen, loaded.network, loaded.tokens, m.cases, false, on);
        asked[i++].inside +=
            evaluate::needle(e.chosen, loaded.network, loaded.tokens, m.cases, true, on);
      }
    }
    return std::pair(asked, m.cases.size());
  };
  const auto [whole, all] = recall(4);
  CHECK(all == needles.size());
  const auto [parts, last] = recall(0.02);
  CHECK(last < needles.size());
  REQUIRE(whole.size() == 3);
  REQUIRE(parts.size() == 3);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    CAPTURE(i);
    for (const auto of : {&evaluate::needle_recall::after, &evaluate::needle_recall::inside}) {
      CHECK((parts[i].*of).right == (whole[i].*of).right);
      CHECK((parts[i].*of).asked == (whole[i].*of).asked);
    }
  }
  CHECK(whole[0].after.share().mean > 0);
  CHECK(whole[2].after.share().mean < whole[0].after.share().mean);
}

}  // namespace case_batches_test
