// SPDX-License-Identifier: MIT
#include "evaluate/needle_text.hpp"

#include <fmt/format.h>

#include <algorithm>  // std::min, std::ranges::find
#include <numeric>    // std::accumulate
#include <utility>    // std::pair

namespace evaluate {

engine::chat_turn chat_turn_of(const options& o, const engine::tokenizer& tokens) {
  auto turn = o.chat ? tokens.chat() : engine::chat_turn{};
  detail::require(turn.has_value(),
                  "--chat: expected a GGUF file with a chat template that libllama knows, got '" +
                      o.model.string() + "'");
  if (const auto begin = tokens.begin()) {
    turn->before.insert(turn->before.begin(), *begin);
  }
  return *turn;
}

std::string fill_in(std::string text, const std::string& key, const std::string& value) {
  for (const auto& [field, word] :
       {std::pair<std::string, std::string>{"{key}", key}, {"{value}", value}}) {
    for (std::size_t at = 0; (at = text.find(field, at)) != std::string::npos; at += word.size()) {
      text.replace(at, field.size(), word);
    }
  }
  return text;
}

std::vector<int> encode_question(const std::string& text, const engine::tokenizer& tokens,
                                 const engine::chat_turn& turn) {
  const std::string field = "{turn}";
  const auto at = std::min(text.find(field), text.size());
  const std::string asked = text.substr(0, at),
                    answer = text.substr(std::min(at + field.size(), text.size()));
  if (turn.after.empty()) {
    return tokens.encode_fragment(asked + answer);
  }
  auto question = tokens.encode_fragment(asked);
  const auto begun = tokens.encode_fragment(answer);
  question.insert(question.end(), turn.after.begin(), turn.after.end());
  question.insert(question.end(), begun.begin(), begun.end());
  return question;
}

namespace detail {

std::vector<std::string> draw_names(random_source& random, index_t n) {
  std::vector<std::string> names;
  while (count_of(names) < n) {
    if (std::string name = random.name(); std::ranges::find(names, name) == names.end()) {
      names.push_back(std::move(name));
    }
  }
  return names;
}

}  // namespace detail

namespace {

/// Places for needles of these lengths in `room` tokens, none over another: the first one's within
/// its depth bin, the others' anywhere.
std::vector<index_t> draw_places(random_source& random, std::span<const index_t> lengths,
                                 index_t room, index_t bin) {
  const auto free_of = [&](const std::vector<index_t>& places, index_t place, index_t length) {
    for (std::size_t j = 0; j < places.size(); ++j) {
      if (place < places[j] + lengths[j] && places[j] < place + length) {
        return false;
      }
    }
    return true;
  };
  for (int attempt = 0; attempt < 200; ++attempt) {
    // All at once, so that all ways to lie are as likely; many needles only one after another.
    const int tries = attempt < 100 ? 1 : 1000;
    std::vector<index_t> places;
    for (const index_t length : lengths) {
      for (int t = 0; t < tries; ++t) {
        const double depth =
            places.empty() ? (bin + random.uniform()) / depth_bins : random.uniform();
        const auto place = static_cast<index_t>(depth * (room - length + 1));
        if (free_of(places, place, length)) {
          places.push_back(place);
          break;
        }
      }
    }
    if (places.size() == lengths.size()) {
      return places;
    }
  }
  throw usage_error(
      "--needles: expected a prompt that they fit into: give fewer or a longer --prompt");
}

}  // namespace

needle_text draw_needle(const options& o, const engine::tokenizer& tokens,
                        std::span<const int> text, index_t i, index_t bin) {
  random_source random(o.seed, 2, i);
  const engine::chat_turn turn = chat_turn_of(o, tokens);
  const auto begin = count_of(turn.before);
  const auto keys = detail::draw_names(random, o.needles);  // the first one is asked for
  needle_text result{.body = turn.before, .bin = bin};
  std::vector<std::vector<int>> needles;
  std::vector<index_t> lengths;
  for (const std::string& key : keys) {
    const std::string value = random.digits(o.digits);
    if (needles.empty()) {
      result.value = value;
      result.question = encode_question(fill_in(o.question, key, value), tokens, turn);
    }
    needles.push_back(tokens.encode_fragment(fill_in(o.needle, key, value)));
    lengths.push_back(count_of(needles.back()));
  }
  const index_t room = o.prompt - begin - count_of(result.question);
  const index_t planted = std::accumulate(lengths.begin(), lengths.end(), 0);
  detail::require(2 * planted <= room,
                  fmt::format("--prompt: expected at least {} tokens for needles of {} and a "
                              "question of {} tokens, got {}",
                              2 * planted + o.prompt - room, planted, o.prompt - room, o.prompt));
  const auto places = draw_places(random, lengths, room, result.bin);
  result.fact = begin + places.front(), result.fact_tokens = lengths.front();
  const auto first = as_size(random.below(count_of(text) - (o.prompt - planted) + 1));
  auto prose = text.subspan(first);
  for (index_t at = 0; at < o.prompt - begin;) {
    const auto found = std::ranges::find(places, at);
    if (found == places.end()) {
      result.body.push_back(prose.front());
      prose = prose.subspan(1);
      ++at;
    } else {
      const auto& needle = needles[as_size(found - places.begin())];
      result.body.insert(result.body.end(), needle.begin(), needle.end());
      at += count_of(needle);
    }
  }
  return result;
}

}  // namespace evaluate
