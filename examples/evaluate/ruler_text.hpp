// SPDX-License-Identifier: MIT
/// Prompts with questions in the manner of RULER (Hsieh et al. 2024), scaled to small models.
#pragma once

#include <fmt/format.h>

#include <algorithm>  // std::ranges::sort
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>  // std::pair
#include <vector>

#include "evaluate/needle_text.hpp"

namespace evaluate {

struct ruler_task {
  std::string_view name;
  index_t facts = 0;  ///< planted in the text
  index_t values = 1, queries = 1;
  index_t hops = 0;  ///< from the name asked for to the one with a value
};

/// Without facts: a list of words.
inline constexpr std::array ruler_tasks = {
    ruler_task{"single", 1},
    ruler_task{"multikey_4", 4},
    ruler_task{"multikey_16", 16},
    ruler_task{"multivalue", 4, 2},
    ruler_task{"multiquery", 4, 1, 2},
    ruler_task{"tracking_1", 4, 1, 1, 1},
    ruler_task{"tracking_2", 6, 1, 1, 2},
    ruler_task{"tracking_4", 10, 1, 1, 4},
    ruler_task{"common_words"},
};

/// In the place of a value: what a hop follows.
inline constexpr const char* same_as = "the same as that of {key}";
inline constexpr const char* word_list = " Words: {value}. ";
inline constexpr const char* word_question = "\nQuestion: what is the most common word? Answer:";

struct ruler_ask {
  std::vector<int> question;
  std::vector<std::string> values;  ///< all of which must be given
};

struct ruler_text {
  std::vector<int> body;        ///< as long as the prompt
  std::vector<ruler_ask> asks;  ///< the first fits over the end of the body
};

namespace detail {

/// Text of `length` tokens with `pieces`, in order, dropped in at random places of its first
/// `room` ones.
inline std::vector<int> weave(random_source& random, std::span<const int> text,
                              const std::vector<std::vector<int>>& pieces, index_t room,
                              index_t length) {
  index_t planted = 0;
  for (const auto& piece : pieces) {
    planted += count_of(piece);
  }
  std::vector<index_t> cuts;  // of the prose
  while (cuts.size() < pieces.size()) {
    cuts.push_back(random.below(room - planted + 1));
  }
  std::ranges::sort(cuts);
  const auto prose = as_size(length - planted);
  const auto first = as_size(random.below(static_cast<index_t>(text.size() - prose) + 1));
  std::vector<int> body;
  std::size_t next = 0;
  for (std::size_t t = 0; t <= prose; ++t) {
    for (; next < pieces.size() && cuts[next] == static_cast<index_t>(t); ++next) {
      body.insert(body.end(), pieces[next].begin(), pieces[next].end());
    }
    if (t < prose) {
      body.push_back(text[first + t]);
    }
  }
  return body;
}

/// Values of which no two begin alike.
inline std::vector<std::string> draw_values(random_source& random, index_t n, index_t digits) {
  std::vector<std::string> values;
  while (count_of(values) < n) {
    std::string value = random.digits(digits);
    const auto alike = [&](const std::string& v) { return v[0] == value[0]; };
    if (std::ranges::none_of(values, alike)) {
      values.push_back(std::move(value));
    }
  }
  return values;
}

/// A question as its key, and the values that answer it.
using keyed_values = std::pair<std::string, std::vector<std::string>>;

/// Facts about names, in any order; the first names are asked for, and the first of them has all
/// the values.
inline std::vector<std::string> draw_facts(random_source& random, const options& o,
                                           const ruler_task& task,
                                           std::vector<keyed_values>& asked) {
  const auto names = draw_names(random, task.facts - task.values + 1);
  std::vector<std::string> facts;
  for (const std::string& name : names) {
    const auto values = draw_values(random, facts.empty() ? task.values : 1, o.digits);
    for (const std::string& value : values) {
      facts.push_back(fill_in(o.needle, name, value));
    }
    if (count_of(asked) < task.queries) {
      asked.emplace_back(name, values);
    }
  }
  random.shuffle(facts);
  return facts;
}

/// Two chains of names, each in order: the first name of each has a value, all others refer to the
/// one before them. The last name of one is asked for.
inline std::vector<std::string> draw_tracking(random_source& random, const options& o,
                                              const ruler_task& task,
                                              std::vector<keyed_values>& asked) {
  const auto length = as_size(task.hops) + 1;
  const auto names = draw_names(random, 2 * (task.hops + 1));
  const auto values = draw_values(random, 2, o.digits);
  std::vector<std::size_t> turns;  // whose fact comes next
  for (std::size_t i = 0; i < 2 * length; ++i) {
    turns.push_back(i / length);
  }
  random.shuffle(turns);
  std::vector<std::string> facts;
  std::array<std::size_t, 2> done = {0, 0};
  for (const std::size_t chain : turns) {
    const std::size_t i = chain * length + done[chain];
    facts.push_back(fill_in(o.needle, names[i],
                            done[chain] == 0 ? values[chain] : fill_in(same_as, names[i - 1], "")));
    ++done[chain];
  }
  asked.emplace_back(names[length - 1], std::vector{values[0]});
  return facts;
}

/// A list that fills `room` tokens: one word at a quarter of the places, each other one a tenth as
/// often. Empty: there is no room.
inline std::vector<int> draw_words(random_source& random, const engine::tokenizer& tokens,
                                   index_t room, std::string& common) {
  for (index_t n = room / 2; n >= 8; n = n * 19 / 20) {
    const index_t often = n / 4, seldom = std::max(1, often / 10);
    const auto names = draw_names(random, 1 + (n - often + seldom - 1) / seldom);
    std::vector<std::string> words(as_size(often), names[0]);
    for (index_t i = 0; i < n - often; ++i) {
      words.push_back(names[as_size(1 + i / seldom)]);
    }
    random.shuffle(words);
    auto list =
        tokens.encode_fragment(fill_in(word_list, "", fmt::format("{}", fmt::join(words, ", "))));
    if (count_of(list) <= room) {
      common = names[0];
      return list;
    }
  }
  return {};
}

}  // namespace detail

/// Sample `i` of task `which`; none when its facts would take more than two thirds of the prompt.
inline std::optional<ruler_text> draw_ruler(const options& o, const engine::tokenizer& tokens,
                                            std::span<const int> text, std::size_t which,
                                            index_t i) {
  const ruler_task& task = ruler_tasks[which];
  random_source random(o.seed, 16 + which, i);
  ruler_text r;
  std::vector<std::vector<int>> pieces;
  index_t room = 0, planted = 0;
  if (task.facts == 0) {
    r.asks.push_back({tokens.encode_fragment(word_question), {""}});
    room = o.prompt - static_cast<index_t>(r.asks[0].question.size());
    pieces.push_back(detail::draw_words(random, tokens, room, r.asks[0].values[0]));
    if (pieces[0].empty()) {
      return {};
    }
  } else {
    std::vector<detail::keyed_values> asked;
    const auto facts = task.hops > 0 ? detail::draw_tracking(random, o, task, asked)
                                     : detail::draw_facts(random, o, task, asked);
    for (const std::string& fact : facts) {
      pieces.push_back(tokens.encode_fragment(fact));
      planted += count_of(pieces.back());
    }
    for (const auto& [key, values] : asked) {
      r.asks.push_back({encode_question(fill_in(o.question, key, values[0]), tokens, {}), values});
    }
    room = o.prompt - static_cast<index_t>(r.asks[0].question.size());
    if (3 * planted > 2 * room) {
      return {};
    }
  }
  r.body = detail::weave(random, text, pieces, room, o.prompt);
  return r;
}

}  // namespace evaluate
