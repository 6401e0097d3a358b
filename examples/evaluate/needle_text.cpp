#include "evaluate/needle_text.hpp"

#include <fmt/format.h>

#include <algorithm>  // std::ranges::find
#include <utility>    // std::pair

namespace evaluate {

std::string fill_in(std::string text, const std::string& key, const std::string& value) {
  for (const auto& [field, word] :
       {std::pair<std::string, std::string>{"{key}", key}, {"{value}", value}}) {
    for (std::size_t at = 0; (at = text.find(field, at)) != std::string::npos; at += word.size()) {
      text.replace(at, field.size(), word);
    }
  }
  return text;
}

namespace detail {

std::vector<std::string> draw_names(random_source& random, index_t n) {
  std::vector<std::string> names;
  while (static_cast<index_t>(names.size()) < n) {
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
  throw usage_error("--needles: no room for them within the prompt; ask for fewer or a longer one");
}

}  // namespace

needle_text draw_needle(const options& o, const engine::tokenizer& tokens,
                        std::span<const int> text, index_t i, index_t bin) {
  random_source random(o.seed, 2, i);
  const auto keys = detail::draw_names(random, o.needles);  // the first one is asked for
  needle_text result{.body = {}, .question = {}, .value = {}, .bin = bin};
  std::vector<std::vector<int>> needles;
  std::vector<index_t> lengths;
  for (const std::string& key : keys) {
    const std::string value = random.digits(o.digits);
    if (needles.empty()) {
      result.value = value;
      result.question = tokens.encode_fragment(fill_in(o.question, key, value));
    }
    needles.push_back(tokens.encode_fragment(fill_in(o.needle, key, value)));
    lengths.push_back(static_cast<index_t>(needles.back().size()));
  }
  const index_t room = o.prompt - static_cast<index_t>(result.question.size());
  index_t planted = 0;
  for (const index_t length : lengths) {
    planted += length;
  }
  detail::require(2 * planted <= room,
                  fmt::format("--prompt: at least {} tokens expected for needles of {} and a "
                              "question of {} tokens, {} came",
                              2 * planted + o.prompt - room, planted, o.prompt - room, o.prompt));
  const auto places = draw_places(random, lengths, room, result.bin);
  result.fact = places.front(), result.fact_tokens = lengths.front();
  const auto first = static_cast<std::size_t>(
      random.below(static_cast<index_t>(text.size()) - (o.prompt - planted) + 1));
  auto prose = text.subspan(first);
  for (index_t at = 0; at < o.prompt;) {
    const auto found = std::ranges::find(places, at);
    if (found == places.end()) {
      result.body.push_back(prose.front());
      prose = prose.subspan(1);
      ++at;
    } else {
      const auto& needle = needles[static_cast<std::size_t>(found - places.begin())];
      result.body.insert(result.body.end(), needle.begin(), needle.end());
      at += static_cast<index_t>(needle.size());
    }
  }
  return result;
}

}  // namespace evaluate
