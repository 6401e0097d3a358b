// SPDX-License-Identifier: MIT
/// The tasks of the second table, on the bundled model.
#include <catch2/catch.hpp>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/test_files.hpp"
#include "evaluate/needle.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/options.hpp"
#include "evaluate/questions.hpp"
#include "evaluate/table.hpp"
#include "support/paths.hpp"
#include "support/tiny_model.hpp"

namespace tasks_test {

const std::filesystem::path models = paths::models();

struct output {
  int code = 0;
  std::string table;
  std::vector<std::string> main, tasks;
};

/// The program on the bundled model.
output run(const std::vector<std::string>& more) {
  const test::temporary_folder folder;
  std::vector<std::string> words = {"evaluate", "--model", (models / "kvmeld-2m").string()};
  for (const std::string& word : {std::string("--text"), (models / "held-out.txt").string(),
                                  std::string("--csv"), (folder.path() / "e.csv").string(),
                                  std::string("--plots"), (folder.path() / "plots").string()}) {
    words.push_back(word);
  }
  words.insert(words.end(), more.begin(), more.end());
  std::vector<const char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(word.c_str());
  }
  std::ostringstream table, progress;
  const test::no_pictures none;
  output o;
  o.code = evaluate::run(evaluate::parse(static_cast<int>(arguments.size()), arguments.data()),
                         table, progress);
  o.table = table.str();
  for (auto [file, lines] : {std::pair{"e.csv", &o.main}, {"e-tasks.csv", &o.tasks}}) {
    std::ifstream in(folder.path() / file);
    for (std::string line; std::getline(in, line);) {
      lines->push_back(line);
    }
  }
  return o;
}

std::vector<std::string> fields(const std::string& line) {
  std::vector<std::string> all;
  std::istringstream in(line + ",");
  for (std::string word; std::getline(in, word, ',');) {
    all.push_back(word);
  }
  return all;
}

TEST_CASE("the likeliest token but one") {
  evaluate::row_major_matrix logits(1, 4);
  logits << 1, 3, 2, 0;
  CHECK(evaluate::likeliest(logits) == 1);
  CHECK(evaluate::likeliest(logits, 1) == 2);
  CHECK(evaluate::likeliest(logits, 0) == 1);
}

TEST_CASE("the full cache loses nothing on chain and ruler, and the last tokens alone do") {
  const output o = run({"--tasks", "chain,ruler", "--policies", "full_cache,streaming_llm",
                        "--budgets", "40", "--prompt", "240", "--samples", "4"});
  CHECK(o.code == 0);
  REQUIRE_FALSE(o.main.empty());
  CHECK(o.main[0] == test::header);
  REQUIRE(o.tasks.size() > 4);
  CHECK(o.tasks[0] ==
        "policy,budget,slots,task,samples,full_after,after,full_inside,inside,full_nats,nats,kl");
  std::set<std::string> tasks;
  for (std::size_t i = 1; i < o.tasks.size(); ++i) {
    CAPTURE(o.tasks[i]);
    const auto f = fields(o.tasks[i]);
    REQUIRE(f.size() == 12);
    CHECK((f[9].empty() && f[10].empty() && f[11].empty()));  // of stream_needle
    CHECK(f[4] == "4");
    const bool chain = f[3] == "chain";
    CHECK(chain == f[8].empty());
    CHECK(chain == f[7].empty());
    CHECK((chain || std::stod(f[5]) >= 0.5));
    if (f[0] == "full_cache") {
      CHECK(std::vector{f[1], f[2]} == std::vector<std::string>{"1.0", "240"});
      CHECK(f[5] == f[6]);
      CHECK(f[7] == f[8]);
    } else {
      CHECK(std::vector{f[1], f[2]} == std::vector<std::string>{"40", "40"});
      CHECK((chain ? std::stod(f[6]) > std::stod(f[5]) + 0.1 : std::stod(f[6]) < std::stod(f[5])));
    }
    tasks.insert(f[3]);
  }
  for (const char* task : {"chain", "single", "multikey_4", "multivalue", "multiquery"}) {
    CAPTURE(task);
    CHECK(tasks.contains(task));
  }
  // 16 keys do not fit, and the model was not taught to follow names.
  CHECK_FALSE(tasks.contains("multikey_16"));
  CHECK_THAT(o.table, Catch::Contains("Points lost against the full cache on the same 4 samples") &&
                          Catch::Contains("note: multikey_16 is left out: it would take") &&
                          Catch::Contains("note: tracking_4 is left out"));
}

TEST_CASE("copy counts the nats of the passage in the middle, where it comes again") {
  const test::tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  std::vector<int> tokens;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, 96)) {
    tokens.push_back(c);
  }
  const std::vector<evaluate::named_policy> policies = {
      {.name = "full_cache", .policy = evaluate::full_cache()},
      {.name = "h2o", .policy = kvmeld::h2o{}}};
  const std::vector<evaluate::contender> contenders = {
      {.index = 0, .policy = policies[0].policy, .limit = {96}},
      {.index = 1, .policy = policies[1].policy, .limit = {20}}};
  const auto scores = evaluate::copy(model, tokens, policies, contenders, 200);
  auto both = tokens;  // half of so short a prompt
  both.insert(both.end(), tokens.begin() + 24, tokens.begin() + 72);
  const auto logits = engine::prefill(model, both, engine::logits_of::all).logits;
  double sum = 0;
  for (Eigen::Index i = 0; i < 48; ++i) {
    sum += evaluate::surprise(logits.row(95 + i), both[static_cast<std::size_t>(96 + i)]);
  }
  REQUIRE(scores.size() == 2);
  CHECK(scores[0].after == Approx(sum / 48).epsilon(1e-5));
  CHECK(scores[1].after != Approx(sum / 48).epsilon(1e-5));
  CHECK(!scores[0].inside);
}

TEST_CASE("stream_needle: nats of the answer as a prompt has them, and KL from the full cache's") {
  const test::tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto words = engine::tokenizer::load(files.file(""), 256);
  const std::string all = engine::read_file(files.file("text.txt"));
  const evaluate::needle_text text{.body = words.encode_fragment(all.substr(0, 80)),
                                   .question = words.encode_fragment(all.substr(80, 9)),
                                   .value = "123"};
  const auto scores = evaluate::stream_needle(
      model, words, text,
      std::vector<evaluate::contender>{{.policy = evaluate::full_cache(), .limit = {96}},
                                       {.policy = kvmeld::h2o{}, .limit = {20}}});
  std::vector<int> whole = text.body;
  whole.insert(whole.end(), text.question.begin(), text.question.end());
  for (const int token : words.encode_fragment(" 123")) {
    whole.push_back(token);
  }
  const auto logits = engine::prefill(model, whole, engine::logits_of::all).logits;
  double nats = 0;
  for (Eigen::Index i = 0; i < 4; ++i) {
    nats += evaluate::surprise(logits.row(88 + i), whole[static_cast<std::size_t>(89 + i)]) / 4;
  }
  REQUIRE(scores.size() == 2);
  CHECK(*scores[0].nats == Approx(nats).epsilon(1e-4));
  CHECK(*scores[0].kl == 0);
  CHECK(*scores[1].nats != Approx(nats).epsilon(1e-3));
  CHECK(*scores[1].kl > 1e-6);
  CHECK(!scores[0].inside);
}

TEST_CASE("copy has a column in the second table") {
  const output o = run({"--tasks", "copy", "--policies", "full_cache,streaming_llm", "--budgets",
                        "40", "--prompt", "128", "--samples", "2"});
  CHECK(o.code == 0);
  REQUIRE(o.tasks.size() == 3);
  const auto full = fields(o.tasks[1]), latest = fields(o.tasks[2]);
  CHECK(std::vector{full[0], full[3]} == std::vector<std::string>{"full_cache", "copy"});
  CHECK(full[5] == full[6]);
  CHECK((full[7].empty() && full[8].empty()));
  CHECK(std::stod(latest[6]) > std::stod(full[6]));
}

TEST_CASE("the same seed gives the tasks the same bytes for any number of threads") {
  std::vector<std::string> words = {"--tasks",    "chain,ruler",   "--samples", "2",
                                    "--policies", "streaming_llm", "--budgets", "40",
                                    "--prompt",   "100",           "--threads", "1"};
  const auto once = run(words).tasks;
  CHECK(once.size() > 2);
  words.back() = "2";
  CHECK(run(words).tasks == once);
}

TEST_CASE("a task that the full cache cannot do is left out, and the run says so") {
  const output o = run({"--tasks", "ruler", "--policies", "streaming_llm", "--budgets", "40",
                        "--prompt", "120", "--samples", "1", "--question", "\\n{key} {key}"});
  CHECK(o.code == 0);
  CHECK(o.tasks.size() == 1);
  CHECK_THAT(o.table, Catch::Contains("note: single is left out: the full cache answers 0 %") &&
                          !Catch::Contains("Points lost"));
}

TEST_CASE("no second file is written, nor any sample drawn, when its tasks are not asked for") {
  const output o = run({"--tasks", "error", "--policies", "streaming_llm", "--budgets", "40",
                        "--prompt", "100", "--prompts", "1"});
  CHECK(o.code == 0);
  CHECK(o.main.size() == 2);
  CHECK(o.tasks.empty());
}

TEST_CASE("no samples and unknown tasks are refused") {
  CHECK_THROWS_WITH(run({"--samples", "0"}), Catch::Contains("--samples: expected 1 to "));
  CHECK_THROWS_WITH(run({"--tasks", "chains"}),
                    Catch::Contains("chain,ruler,stream_needle,copy, got 'chains'"));
}

TEST_CASE("the tasks' table marks the least loss of a group") {
  const evaluate::contender chosen{.index = 0, .policy = evaluate::full_cache(), .limit = {40}};
  evaluate::plan todo{.policies = {}, .full = chosen, .groups = {}, .notes = {}};
  todo.groups.push_back({.title = "a title", .entries = {}});
  for (const char* name : {"one", "two", "three"}) {
    todo.groups[0].entries.push_back({.chosen = chosen, .name = name});
  }
  const auto table = evaluate::tasks_table(
      todo, {{.name = "single",
              .measure = evaluate::task_measure::points,
              .samples = 20,
              .full = {1, 0.9},
              .entries = {evaluate::score{1, 0.4}, evaluate::score{0.75, 0.9}, std::nullopt}},
             {.name = "chain",
              .measure = evaluate::task_measure::nats,
              .samples = 20,
              .full = {0.1, {}},
              .entries = {evaluate::score{0.5, {}}, evaluate::score{0.2504, {}}, std::nullopt}}});
  CHECK_THAT(table, Catch::Contains("0*/ 50") && Catch::Contains("25 /  0*") &&
                        Catch::Contains("100 / 90") && Catch::Contains("0.250*") &&
                        Catch::Contains("0.500\n") && Catch::Contains("a title"));
  CHECK(evaluate::tasks_table(todo, {}).empty());
  CHECK(evaluate::tasks_file("a/b.csv") == "a/b-tasks.csv");
}

}  // namespace tasks_test
