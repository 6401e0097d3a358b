// SPDX-License-Identifier: MIT
/// `--prompts FILE`: what is read, how answers are scored, and a whole run on the bundled model.
#include "evaluate/prompt_file.hpp"

#include <catch2/catch.hpp>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.hpp"
#include "engine/model.hpp"
#include "engine/prefill.hpp"
#include "engine/test_files.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/options.hpp"
#include "support/paths.hpp"

namespace prompt_file_test {

using evaluate::metric;
using strings = std::vector<std::string>;

const std::filesystem::path models = paths::models();

std::filesystem::path written(const test::temporary_folder& folder, const std::string& text) {
  return folder.write("p.jsonl", text);
}

/// What is said of a file; its name is "F" there.
std::string refusal_of(const std::string& text) {
  const test::temporary_folder folder;
  const auto file = written(folder, text);
  try {
    evaluate::read_prompts(file);
  } catch (const engine::format_error& e) {
    const std::string said = e.what();
    return "F" + said.substr(file.string().size());
  }
  return "taken";
}

const std::string good = R"({"context": "c", "question": "q", "answers": ["a"]})";

TEST_CASE("prompts are read as they are, with any text and other fields") {
  const test::temporary_folder folder;
  const auto prompts = evaluate::read_prompts(written(
      folder,
      good + "\r\n" +
          R"({"context": "Straße \u00e9\n", "question": " 日本?", "answers": ["é", "\ud83d\ude00"], "metric": "f1", "length": 3})"
          "\n" +
          R"({"context": "c", "question": "q", "answers": ["a b"], "metric": "nats"})"));
  REQUIRE(prompts.size() == 3);
  CHECK(prompts[0].by == metric::contains);
  CHECK(prompts[1].context == "Straße é\n");
  CHECK(prompts[1].question == " 日本?");
  CHECK(prompts[1].answers == strings{"é", "😀"});
  CHECK(prompts[1].by == metric::f1);
  CHECK(prompts[2].by == metric::nats);
}

TEST_CASE("lines that are no prompts are refused, by their number") {
  CHECK(refusal_of(good + "\n{\"context\": ") ==
        "F:2: expected a JSON object, got text that is not JSON");
  CHECK(refusal_of("[1]") == "F:1: expected a JSON object, got an array");
  CHECK(refusal_of(good + "\n\n" + good) ==
        "F:2: expected a JSON object, got text that is not JSON");
  CHECK(refusal_of("{\"context\": \"\xff\"}") ==
        "F:1: expected a JSON object, got text that is not JSON");
  CHECK(refusal_of(R"({"context": "c", "answers": ["a"]})") == R"(F:1: expected "question")");
  CHECK(refusal_of(R"({"context": 3, "question": "q", "answers": ["a"]})") ==
        R"(F:1: "context": expected a string, got 3)");
  CHECK(refusal_of(R"({"context": "c", "question": "", "answers": ["a"]})") ==
        R"(F:1: "question": expected text, got "")");
  for (const char* answers : {R"([])", R"(["a", ""])", R"(["a", 5])"}) {
    CHECK(refusal_of(R"({"context": "c", "question": "q", "answers": )" + std::string(answers) +
                     "}") ==
          R"(F:1: "answers": expected a list of texts, none of them empty, got an array)");
  }
  CHECK(refusal_of(R"({"context": "c", "question": "q", "answers": "a"})") ==
        R"(F:1: "answers": expected a list of texts, none of them empty, got "a")");
  CHECK(refusal_of(R"({"context": "c", "question": "q", "answers": ["a"], "metric": "F1"})") ==
        R"(F:1: "metric": expected contains, exact, f1 or nats, got "F1")");
  CHECK(
      refusal_of(R"({"context": "c", "question": "q", "answers": ["a", "b"], "metric": "nats"})") ==
      R"(F:1: "answers": expected 1 for nats, got 2)");
  CHECK(refusal_of("") == "F: expected at least 1 prompt, got none");
}

TEST_CASE("scores are those counted by hand") {
  const auto by = [](metric m) {
    return [m](const std::string& text, const strings& answers) {
      return evaluate::score_of({"c", "q", answers, m}, text);
    };
  };
  const auto contains = by(metric::contains), exact = by(metric::exact), f1 = by(metric::f1);
  CHECK(contains("Codes: ABC and 77.", {"abc"}) == 1);
  CHECK(contains("Codes: ABC and 77.", {"abc", "78", "77", "b"}) == .75);
  CHECK(contains("", {"a"}) == 0);
  CHECK(contains("die Straße", {"STRAßE"}) == 1);  // letters that are not ASCII as they are

  CHECK(exact(" The cat.\nIt sat.", {"dog", "cat"}) == 1);
  CHECK(exact("cat sat", {"cat"}) == 0);
  CHECK(exact("sat cat", {"cat sat"}) == 0);
  CHECK(exact("\n\n Cat!", {"a cat"}) == 1);
  CHECK(exact("", {"the"}) == 0);

  // 2 of 3 words, of 4 wanted: 2 · 2 / 7.
  CHECK(f1("red red green", {"red blue green blue"}) == Approx(4. / 7));
  CHECK(f1("red red green", {"blue", "red, red; blue"}) == Approx(4. / 6));
  CHECK(f1("green", {"red"}) == 0);
  CHECK(f1("the", {"an"}) == 0);
  CHECK(f1("A red. \nblue", {"red"}) == 1);
}

struct output {
  int code = 0;
  std::string table;
  strings rows;
};

/// The program on the bundled model and a file of these lines.
output run(const std::string& lines, strings more) {
  const test::temporary_folder folder;
  const auto file = written(folder, lines);
  strings words = {"evaluate",    "--model", (models / "kvmeld-2m").string(),   "--prompts",
                   file.string(), "--csv",   (folder.path() / "e.csv").string()};
  words.insert(words.end(), more.begin(), more.end());
  std::vector<const char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(word.c_str());
  }
  std::ostringstream table, progress;
  output o;
  o.code = evaluate::run(evaluate::parse(static_cast<int>(arguments.size()), arguments.data()),
                         table, progress);
  o.table = table.str();
  std::istringstream csv(engine::read_file(folder.path() / "e.csv"));
  for (std::string line; std::getline(csv, line);) {
    o.rows.push_back(line);
  }
  return o;
}

/// Prose with a fact in the middle, or another at the beginning, and a question about the first.
std::string prompt_line(int place, const std::string& metric) {
  const std::string prose = engine::read_file(models / "held-out.txt");
  std::string context;
  for (const char c : prose.substr(30'000 + 700 * static_cast<std::size_t>(place), 700)) {
    context += c == '\n' || c == '"' || c == '\\' || c < 0 ? ' ' : c;
  }
  context.insert(context.find(' ', 300), " The secret code of Mirola is 48213. ");
  return R"({"context": ")" + context +
         R"(", "question": "\nQuestion: what is the secret code of Mirola? Answer:", "answers": ["48213"], "metric": ")" +
         metric + "\"}\n";
}

TEST_CASE("prompts of a file are asked of every policy, after compression") {
  const std::string lines = prompt_line(0, "contains") + prompt_line(1, "contains") +
                            prompt_line(2, "contains") + prompt_line(0, "nats") +
                            prompt_line(1, "nats") + prompt_line(2, "nats");
  const strings words = {"--policies", "full_cache,streaming_llm,snapkv,fold,h2o",
                         "--budgets",  "0.2,4",
                         "--threads",  "2"};
  const output o = run(lines, words);
  CHECK(o.code == 0);
  INFO(o.table);
  REQUIRE(o.rows.size() == 1 + 2 * (1 + 4));  // nothing holds 4 slots
  CHECK(o.rows[0] == "policy,budget,slots,file,metric,prompts,score,score_se");
  std::map<std::string, double> score;
  for (const std::string& row : strings(o.rows.begin() + 1, o.rows.end())) {
    strings field;
    std::istringstream in(row);
    for (std::string x; std::getline(in, x, ',');) {
      field.push_back(x);
    }
    REQUIRE(field.size() == 8);
    CHECK(field[3] == "p");
    CHECK(field[5] == "3");
    score[field[0] + " " + field[4]] = std::stod(field[6]);
    CHECK(std::stod(field[7]) >= 0);
  }
  CHECK(score.at("full_cache contains") == 1);
  CHECK(score.at("streaming_llm contains") == 0);  // what is in the middle is gone
  CHECK(score.at("full_cache nats") < .2);
  CHECK(score.at("streaming_llm nats") > 1);
  CHECK(score.at("fold nats") < score.at("streaming_llm nats"));
  CHECK(o.table.find("contains, %") != std::string::npos);
  CHECK(o.table.find("nats/token") != std::string::npos);
  CHECK(o.table.find("refused: needs at least") != std::string::npos);
  strings one_by_one = words;
  one_by_one.insert(one_by_one.end(), {"--memory", "1e-6"});
  CHECK(run(lines, one_by_one).rows == o.rows);
}

TEST_CASE("a file that is refused leaves the results that are there") {
  const test::temporary_folder folder;
  const std::string csv = folder.write("e.csv", "kept").string(),
                    file = written(folder, good + "\n{}").string(),
                    model = (models / "kvmeld-2m").string();
  const std::vector<const char*> words = {"evaluate",   "--model", model.c_str(), "--prompts",
                                          file.c_str(), "--csv",   csv.c_str()};
  std::ostringstream out, err;
  CHECK_THROWS_WITH(evaluate::run(evaluate::parse(7, words.data()), out, err),
                    file + ":2: expected \"context\"");
  CHECK(engine::read_file(csv) == "kept");
}

TEST_CASE("nats of an answer are those of the tokens one by one over the whole prompt") {
  const auto loaded = engine::model::load(models / "kvmeld-2m");
  const std::string line = prompt_line(1, "nats");
  const test::temporary_folder folder;
  const auto p = evaluate::read_prompts(written(folder, line)).front();
  auto tokens = loaded.tokens.encode(p.context);
  for (const int t : loaded.tokens.encode_fragment(p.question)) {
    tokens.push_back(t);
  }
  const auto answer = loaded.tokens.encode_fragment(" " + p.answers[0]);
  double nats = 0;
  for (const int t : answer) {
    const auto r = engine::prefill(loaded.network, tokens);
    nats += evaluate::surprise(r.logits, t) / static_cast<double>(answer.size());
    tokens.push_back(t);
  }
  const output o = run(line, {"--policies", "h2o", "--budgets", "64"});
  INFO(o.table);
  REQUIRE(o.rows.size() == 3);
  const auto score = std::stod(o.rows[1].substr(o.rows[1].find(",nats,1,") + 8));
  CHECK(score == Approx(nats).margin(1e-4));
  CHECK(o.rows[1].back() == ',');  // one prompt has no standard error
}

TEST_CASE("prompts are given as a number or as files") {
  const auto parse = [](const std::string& value) {
    const std::string model = (models / "kvmeld-2m").string(),
                      text = (models / "held-out.txt").string();
    const std::vector<const char*> words = {"evaluate",   "--model",   model.c_str(), "--text",
                                            text.c_str(), "--prompts", value.c_str()};
    return evaluate::parse(static_cast<int>(words.size()), words.data());
  };
  CHECK(parse("3").prompts == 3);
  CHECK(parse("3").files.empty());
  CHECK_THROWS_WITH(parse("3x"), "--prompts: expected a number or JSONL files, got '3x'");
  CHECK_THROWS_WITH(parse("/nowhere"),
                    "--prompts: expected a number or JSONL files, got '/nowhere'");
}

}  // namespace prompt_file_test
