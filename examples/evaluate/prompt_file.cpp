// SPDX-License-Identifier: MIT
#include "evaluate/prompt_file.hpp"

#include <algorithm>  // std::ranges::find, std::ranges::sort, std::ranges::set_intersection
#include <array>
#include <cctype>    // std::ispunct, std::tolower
#include <iterator>  // std::back_inserter
#include <sstream>

#include "engine/json.hpp"

namespace evaluate {

namespace {

constexpr std::array<std::string_view, 4> metric_names = {"contains", "exact", "f1", "nats"};

/// Of ASCII; all other bytes stay.
std::string small_letters(std::string_view text) {
  std::string small(text);
  for (char& c : small) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return small;
}

std::vector<std::string> words_of(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  std::string line = small_letters(text.substr(0, text.find('\n')));
  std::erase_if(line, [](char c) { return std::ispunct(static_cast<unsigned char>(c)) != 0; });
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) {
    if (word != "a" && word != "an" && word != "the") {
      words.push_back(word);
    }
  }
  return words;
}

double f1(std::vector<std::string> words, std::vector<std::string> wanted) {
  std::ranges::sort(words);
  std::ranges::sort(wanted);
  std::vector<std::string> shared;
  std::ranges::set_intersection(words, wanted, std::back_inserter(shared));
  const std::size_t all = words.size() + wanted.size();
  return all > 0 ? 2 * static_cast<double>(shared.size()) / static_cast<double>(all) : 0;
}

asked_prompt parse_prompt(const std::string& line, const std::filesystem::path& place) {
  const auto object = engine::parse_object(line, place);
  const engine::json_fields fields(object, place);
  asked_prompt p{fields.word("context"), fields.word("question"), {}};
  fields.expect(!p.context.empty(), "context", "text");
  fields.expect(!p.question.empty(), "question", "text");
  const auto& answers = fields.at("answers");
  const auto is_text = [](const auto& x) { return x.is_string() && x != ""; };
  fields.expect(answers.is_array() && !answers.empty() && std::ranges::all_of(answers, is_text),
                "answers", "a list of texts, none of them empty");
  p.answers = answers.get<std::vector<std::string>>();
  if (fields.has("metric")) {
    const auto found = std::ranges::find(metric_names, fields.word("metric"));
    fields.expect(found != metric_names.end(), "metric", "contains, exact, f1 or nats");
    p.by = static_cast<metric>(found - metric_names.begin());
  }
  if (p.by == metric::nats && p.answers.size() > 1) {
    throw engine::format_error(place, "\"answers\": expected 1 for nats, got ", p.answers.size());
  }
  return p;
}

}  // namespace

std::string_view name_of(metric m) { return metric_names[static_cast<std::size_t>(m)]; }

std::vector<asked_prompt> read_prompts(const std::filesystem::path& file) {
  auto in = engine::open_file(file);
  std::vector<asked_prompt> prompts;
  for (std::string line; std::getline(in, line);) {
    prompts.push_back(parse_prompt(line, file.string() + ":" + std::to_string(prompts.size() + 1)));
  }
  if (prompts.empty()) {
    throw engine::format_error(file, "expected at least 1 prompt, got none");
  }
  return prompts;
}

double score_of(const asked_prompt& p, std::string_view text) {
  const auto words = words_of(text);
  const std::string small = small_letters(text);
  double found = 0, best = 0;
  for (const std::string& answer : p.answers) {
    const auto wanted = words_of(answer);
    found += small.find(small_letters(answer)) != small.npos ? 1 : 0;
    best = std::max(best, p.by == metric::f1                  ? f1(words, wanted)
                          : !words.empty() && words == wanted ? 1.0
                                                              : 0.0);
  }
  return p.by == metric::contains ? found / static_cast<double>(p.answers.size()) : best;
}

}  // namespace evaluate
