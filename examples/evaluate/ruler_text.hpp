// SPDX-License-Identifier: MIT
/// Prompts with questions in the manner of RULER (Hsieh et al. 2024), scaled to small models.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

/// Sample `i` of task `which`; none when its facts would take more than two thirds of the prompt.
std::optional<ruler_text> draw_ruler(const options& o, const engine::tokenizer& tokens,
                                     std::span<const int> text, std::size_t which, index_t i);

}  // namespace evaluate
