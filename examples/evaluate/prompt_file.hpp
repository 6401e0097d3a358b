// SPDX-License-Identifier: MIT
/// Prompts of others: a JSON object a line, and how what a model writes is scored.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace evaluate {

/// Words are SQuAD's (Rajpurkar et al. 2016), of the first line that has any: ASCII in small
/// letters, without punctuation and articles.
enum class metric {
  contains,  ///< share of the answers that the text has (RULER's string_match_all), in any case
  exact,     ///< 1: its words are those of an answer
  f1,   ///< 2 · shared words / words of both, each as often as both have it; the best answer's
  nats  ///< a token of the one answer
};

std::string_view name_of(metric m);

/// Texts go to the model as they are.
struct asked_prompt {
  std::string context, question;
  std::vector<std::string> answers;
  metric by = metric::contains;
};

/// `{"context": "...", "question": "...", "answers": ["...", ...], "metric": "f1"}` a line; other
/// fields are not read. Throws `engine::format_error`, which names the line: no JSON object, a
/// field that is missing or empty or of another kind, another metric, several answers for `nats`.
std::vector<asked_prompt> read_prompts(const std::filesystem::path& file);

/// Of greedy text, by all metrics but `nats`.
double score_of(const asked_prompt& p, std::string_view text);

}  // namespace evaluate
