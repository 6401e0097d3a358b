// SPDX-License-Identifier: MIT
// Prompt look-up, and kvmeld-llama with drafts: it writes what it writes without them.
#include <catch2/catch.hpp>
#include <sstream>

#include "evaluate/options.hpp"
#include "llama_cpp/bundled.hpp"
#include "llama_cpp/draft.hpp"
#include "llama_cpp/program.hpp"

namespace draft_program_test {

using namespace test;
using kvmeld::llama::look_up;
using kvmeld::llama::program_options;

struct run_of {
  std::string text;               ///< written
  int right = 0, guessed = 0;     ///< tokens
  std::vector<std::string> held;  ///< the table's lines on slots and bytes
};

run_of run(program_options o, index_t draft) {
  o.draft = draft;
  std::ostringstream out, progress;
  REQUIRE(kvmeld::llama::run(o, out, progress) == 0);
  const std::string printed = out.str();
  run_of r;
  r.text = printed.substr(0, printed.find("\n\n"));
  std::istringstream lines(printed.substr(r.text.size()));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("slots") || line.starts_with("KV") || line.starts_with("tokens")) {
      r.held.push_back(line);
    }
    std::istringstream words(line);
    std::string a, b, c, of;
    words >> a >> b >> c;
    if (a == "guessed") {
      words >> r.right >> of >> r.guessed;
    }
  }
  return r;
}

TEST_CASE("llama.cpp: prompt look-up gives what followed the latest longest repetition") {
  const std::vector<int> text = {1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3};
  CHECK(look_up(text, 8) == std::vector<int>{4, 9, 2, 3, 5, 6, 1, 2});
  CHECK(look_up(text, 2) == std::vector<int>{4, 9});
  CHECK(look_up(text, 0).empty());
  CHECK(look_up(std::vector<int>{7, 8, 2, 3, 7, 3, 2}, 3) == std::vector<int>{3, 7, 3});
  CHECK(look_up(std::vector<int>{5, 5, 5}, 4) == std::vector<int>{5});
  CHECK(look_up(std::vector<int>{1, 2, 3}, 4).empty());
  CHECK(look_up(std::vector<int>{1}, 4).empty());
  CHECK(look_up({}, 4).empty());
}

TEST_CASE("llama.cpp: the program writes with drafts what it writes without, and holds the same") {
  const temporary_folder folder;
  program_options o;
  o.model = paths::gguf();
  o.prompt_file = folder.write("prompt.txt", bundled::text().substr(0, 1500)).string();
  o.alone = true;
  o.chunk = 64, o.budget = 96, o.predict = 120;
  o.cache_type = "f32";
  int right = 0;
  for (const std::string policy :
       {"h2o", "streaming_llm", "tova", "keepkv", "fold", "full_cache"}) {
    CAPTURE(policy);
    o.policy = policy;
    o.equal = true, o.trigger = policy == "full_cache" ? 0 : 128;
    const run_of plain = run(o, 0), drafted = run(o, 6);
    CHECK(drafted.text == plain.text);
    CHECK(drafted.held == plain.held);
    CHECK((plain.guessed == 0 && drafted.guessed > 0));
    right += drafted.right;
  }
  CHECK(right > 0);
  // Without slots to spare nothing is guessed; fold frees some at a time.
  o.trigger = 0, o.policy = "h2o";
  CHECK(run(o, 6).guessed == 0);
  o.policy = "fold", o.equal = false;
  CHECK(run(o, 6).text == run(o, 0).text);
  const auto refused = [](const char* option, const char* value, const char* why) {
    const std::vector<const char*> asked = {
        "kvmeld-llama", "--model", "m", "--prompt-file", "p", "--draft", "4", option, value};
    CHECK_THROWS_WITH(program_options::parse(static_cast<int>(asked.size()), asked.data()), why);
  };
  refused("--mode", "repack", "--draft: expected --mode own with it, got --mode repack");
  refused("--policy", "attention_matching",
          "--draft: expected a policy that decodes with it, got --policy attention_matching");
}

}  // namespace draft_program_test
