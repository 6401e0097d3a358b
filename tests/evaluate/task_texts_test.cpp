// SPDX-License-Identifier: MIT
/// What the tasks of the second table draw: chains, and texts with questions.
#include <catch2/catch.hpp>
#include <cmath>  // std::log
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/test_files.hpp"
#include "evaluate/chain_text.hpp"
#include "evaluate/prompt.hpp"
#include "evaluate/ruler_text.hpp"
#include "support/paths.hpp"

namespace task_texts_test {

using evaluate::index_t;

const std::filesystem::path models = paths::models();

const engine::tokenizer& tokenizer() {
  static const auto loaded = engine::tokenizer::load(models / "kvmeld-2m", 512);
  return loaded;
}

const std::vector<int>& prose() {
  static const auto tokens =
      tokenizer().encode(engine::read_file(models / "held-out.txt").substr(0, 20'000));
  return tokens;
}

/// Every fact in `text`: whose code it is, and what it is or whose it is the same as.
std::vector<std::pair<std::string, std::string>> facts_in(const std::string& text) {
  const std::regex fact("The secret code of (\\w+) is (?:the same as that of )?(\\w+)\\.");
  std::vector<std::pair<std::string, std::string>> facts;
  for (std::sregex_iterator at(text.begin(), text.end(), fact), end; at != end; ++at) {
    facts.emplace_back((*at)[1], (*at)[2]);
  }
  return facts;
}

/// The key of the question.
std::string key_of(const evaluate::ruler_ask& ask) {
  std::smatch found;
  const std::string text = tokenizer().decode(ask.question);
  REQUIRE(std::regex_search(text, found, std::regex("code of (\\w+)\\?")));
  return found[1];
}

/// The bundled vocabulary with a chat template around what is said.
class chatting : public engine::text_codec {
 public:
  index_t size() const override { return tokenizer().vocab_size(); }
  std::vector<int> encode(std::string_view text, bool fragment) const override {
    return fragment ? tokenizer().encode_fragment(text) : tokenizer().encode(text);
  }
  std::string decode(std::span<const int> tokens) const override {
    return tokenizer().decode(tokens);
  }
  std::optional<engine::chat_turn> chat() const override {
    return engine::chat_turn{.before = {1, 2, 1}, .after = {2, 1}};
  }
};

TEST_CASE("a needle case is a turn of a chat, where that is asked for") {
  const engine::tokenizer chat(std::make_unique<chatting>());
  evaluate::options o;
  const auto plain = evaluate::draw_needle(o, chat, prose(), 0, 3);
  o.chat = true;
  const auto turn = evaluate::draw_needle(o, chat, prose(), 0, 3);
  CHECK(turn.body.size() == static_cast<std::size_t>(o.prompt));
  CHECK(std::vector(turn.body.begin(), turn.body.begin() + 3) == std::vector{1, 2, 1});
  auto question = plain.question;
  question.insert(question.end(), {2, 1});
  CHECK(turn.question == question);
  CHECK(turn.value == plain.value);
  o.question = "What of {key}?{turn}It is";
  auto ends = chat.encode_fragment("It is");
  const auto begun = evaluate::draw_needle(o, chat, prose(), 0, 3).question;
  ends.insert(ends.begin(), {2, 1});
  REQUIRE(begun.size() > ends.size());
  CHECK(std::equal(ends.rbegin(), ends.rend(), begun.rbegin()));
  o.chat = false;
  CHECK_THAT(chat.decode(evaluate::draw_needle(o, chat, prose(), 0, 3).question),
             Catch::Contains("?It is"));
  o.chat = true;
  const auto fact = std::span(turn.body).subspan(static_cast<std::size_t>(turn.fact),
                                                 static_cast<std::size_t>(turn.fact_tokens));
  CHECK_THAT(chat.decode(fact), Catch::Contains(turn.value));
  const auto words = evaluate::replay_words_of(chat, evaluate::chat_turn_of(o, chat));
  CHECK(words.end == std::vector{2, 1});
  CHECK(words.skipped == std::vector{1, 2, 1});
  CHECK_THROWS_WITH(evaluate::draw_needle(o, tokenizer(), prose(), 0, 3),
                    Catch::Contains("--chat: expected a GGUF file with a chat template"));
}

TEST_CASE("ruler prompts hold their facts before the question, and answer it") {
  const evaluate::options o;
  for (std::size_t which = 0; which < evaluate::ruler_tasks.size(); ++which) {
    const auto& task = evaluate::ruler_tasks[which];
    if (task.facts == 0) {
      continue;
    }
    CAPTURE(task.name);
    for (index_t i = 0; i < 5; ++i) {
      const auto text = evaluate::draw_ruler(o, tokenizer(), prose(), which, i).value();
      REQUIRE(static_cast<index_t>(text.body.size()) == o.prompt);
      const auto room = text.body.size() - text.asks[0].question.size();
      const auto facts = facts_in(tokenizer().decode(std::span(text.body).first(room)));
      CHECK(static_cast<index_t>(facts.size()) == task.facts);
      REQUIRE(static_cast<index_t>(text.asks.size()) == task.queries);
      std::set<std::string> asked;
      for (const auto& ask : text.asks) {
        CHECK(asked.insert(key_of(ask)).second);
        REQUIRE(static_cast<index_t>(ask.values.size()) == task.values);
        std::set<std::string> values;
        for (auto [key, value] : facts) {
          if (key == key_of(ask)) {
            index_t hops = 0;
            for (; value.find_first_of("0123456789") == std::string::npos; ++hops) {
              const auto next = std::ranges::find(facts, value, [](auto& f) { return f.first; });
              REQUIRE(next != facts.end());
              value = next->second;
            }
            CHECK(hops == task.hops);
            values.insert(value);
          }
        }
        CHECK(values == std::set<std::string>(ask.values.begin(), ask.values.end()));
        for (const std::string& value : ask.values) {
          CHECK(static_cast<index_t>(value.size()) == o.digits);
        }
      }
    }
  }
}

TEST_CASE("a list's common word is a quarter of it, and ten times as frequent as any other") {
  const evaluate::options o;
  const std::size_t which = evaluate::ruler_tasks.size() - 1;
  REQUIRE(evaluate::ruler_tasks[which].name == "common_words");
  for (index_t i = 0; i < 5; ++i) {
    const auto text = evaluate::draw_ruler(o, tokenizer(), prose(), which, i).value();
    REQUIRE(static_cast<index_t>(text.body.size()) == o.prompt);
    const auto room = text.body.size() - text.asks[0].question.size();
    std::smatch list;
    const std::string body = tokenizer().decode(std::span(text.body).first(room));
    REQUIRE(std::regex_search(body, list, std::regex("Words: ([^.]*)\\.")));
    std::map<std::string, int> count;
    int all = 0;
    std::istringstream words(list[1]);
    for (std::string word; std::getline(words >> std::ws, word, ',');) {
      ++count[word];
      ++all;
    }
    CHECK(all > 100);
    CHECK(count.at(text.asks[0].values[0]) == all / 4);
    for (const auto& [word, times] : count) {
      CHECK((word == text.asks[0].values[0] || 10 * times <= all / 4));
    }
  }
}

TEST_CASE("the same seed draws the same samples, another sample or seed does not") {
  evaluate::options o, other;
  other.seed = 2;
  for (std::size_t which = 0; which < evaluate::ruler_tasks.size(); ++which) {
    const auto body = [&](const evaluate::options& from, index_t i) {
      return evaluate::draw_ruler(from, tokenizer(), prose(), which, i).value().body;
    };
    CHECK(body(o, 3) == body(o, 3));
    CHECK(body(o, 3) != body(o, 4));
    CHECK(body(o, 3) != body(other, 3));
  }
  const auto letters = evaluate::letters_of(tokenizer());
  const auto chain = [&](std::uint64_t seed, index_t i) {
    return evaluate::draw_chain_text(seed, 300, letters, i).body;
  };
  CHECK(chain(1, 3) == chain(1, 3));
  CHECK(chain(1, 3) != chain(1, 4));
  CHECK(chain(1, 3) != chain(2, 3));
}

TEST_CASE("facts that take more than two thirds of the prompt are none") {
  evaluate::options o;
  o.prompt = 100;
  CHECK(evaluate::draw_ruler(o, tokenizer(), prose(), 0, 0));
  CHECK_FALSE(evaluate::draw_ruler(o, tokenizer(), prose(), 2, 0));  // 16 keys
  o.prompt = 40;
  CHECK_FALSE(evaluate::draw_ruler(o, tokenizer(), prose(), evaluate::ruler_tasks.size() - 1, 0));
}

TEST_CASE("chains are of eight letters, and go on after the prompt") {
  const auto letters = evaluate::letters_of(tokenizer());
  CHECK(std::set<int>(letters.begin(), letters.end()).size() == 8);
  for (const int letter : letters) {
    CHECK(std::regex_match(tokenizer().decode(std::span(&letter, 1)), std::regex(" ?[a-z]")));
  }
  const auto text = evaluate::draw_chain_text(1, 300, letters, 0);
  CHECK(text.body.size() == 300);
  CHECK(text.next.size() == 128);
  for (const int token : text.next) {
    CHECK(std::ranges::find(letters, token) != letters.end());
  }
}

TEST_CASE("a tokenizer whose letters are no single pieces is refused for chains") {
  const test::temporary_folder bytes;
  CHECK_THROWS_WITH(evaluate::letters_of(engine::tokenizer::load(bytes.path(), 256)),
                    Catch::Contains("--tasks chain: expected a tokenizer with 8 letters") &&
                        Catch::Contains("got 0"));
}

TEST_CASE("gamma numbers of shape a have mean a and variance a") {
  evaluate::random_source random(1, 99, 0);
  for (const double a : {0.3, 1.0}) {
    constexpr int n = 100'000;
    double sum = 0, squares = 0;
    for (int i = 0; i < n; ++i) {
      const double x = evaluate::detail::draw_gamma(random, a);
      sum += x;
      squares += x * x;
    }
    CHECK(sum / n == Approx(a).epsilon(0.02));
    CHECK(squares / n - sum / n * sum / n == Approx(a).epsilon(0.06));
  }
}

TEST_CASE("the best predictor is the posterior of all that came before") {
  constexpr index_t k = 5, n = 60;
  constexpr double alpha = 0.3;
  evaluate::random_source random(1, 99, 1);
  const auto states = evaluate::draw_chain(random, k, alpha, n);
  double nats = 0;
  for (std::size_t t = 40; t < n; ++t) {  // counted anew for each
    double same = 0, from = 0;
    for (std::size_t s = 1; s < t; ++s) {
      from += states[s - 1] == states[t - 1];
      same += states[s - 1] == states[t - 1] && states[s] == states[t];
    }
    nats -= std::log((same + alpha) / (from + k * alpha)) / 20;
  }
  CHECK(evaluate::best_predictor(states, k, alpha, 40) == Approx(nats).epsilon(1e-12));
}

TEST_CASE("no other prior predicts chains better") {
  double best = 0;
  std::map<double, double> others = {{0.1, 0}, {0.6, 0}, {1, 0}};
  for (index_t i = 0; i < 200; ++i) {
    evaluate::random_source random(1, 98, i);
    const auto states = evaluate::draw_chain(random, 8, 0.3, 200);
    best += evaluate::best_predictor(states, 8, 0.3, 1);
    for (auto& [alpha, nats] : others) {
      nats += evaluate::best_predictor(states, 8, alpha, 1);
    }
  }
  for (const auto& [alpha, nats] : others) {
    CHECK(best < nats);
  }
}

}  // namespace task_texts_test
