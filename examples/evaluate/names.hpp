/// A policy from its name on the command line: `name[:parameter=value,...][@source]`.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>  // std::ranges::find
#include <cmath>      // std::floor
#include <sstream>    // std::istringstream
#include <string>
#include <vector>

#include "evaluate/policies.hpp"
#include "evaluate/usage.hpp"

namespace evaluate {

namespace detail {

inline std::vector<std::string> split(const std::string& list, char by = ',') {
  std::vector<std::string> words;
  std::string word;
  for (std::istringstream in(list); std::getline(in, word, by);) {
    words.push_back(word);
  }
  return words;
}

/// Sets what `word` ("share=0.4") names, if the policy has it.
inline void set_parameter(named_policy& to, const std::string& word) {
  const std::size_t equals = word.find('=');
  const std::string name = word.substr(0, equals);
  double x = 0;
  require(equals != std::string::npos && CLI::detail::lexical_cast(word.substr(equals + 1), x),
          "--policies: " + to.name + ": parameter=number expected, '" + word + "' came");
  std::string known;
  const auto offer = [&](const char* label, auto& member) {
    known += std::string(known.empty() ? "" : ", ") + label;
    if (name == label) {
      using type = std::remove_reference_t<decltype(member)>;
      require(!std::is_integral_v<type> || (x == std::floor(x) && std::abs(x) < 1e9),
              "--policies: " + to.name + ": a whole number expected, '" + word + "' came");
      member = static_cast<type>(x);
      return true;
    }
    return false;
  };
  const bool found = to.policy.visit([&](auto& p) {
    bool set = false;
    if constexpr (requires { p.sinks; }) set = offer("sinks", p.sinks) || set;
    if constexpr (requires { p.recent; }) set = offer("recent", p.recent) || set;
    if constexpr (requires { p.window; }) set = offer("window", p.window) || set;
    if constexpr (requires { p.kernel; }) set = offer("kernel", p.kernel) || set;
    if constexpr (requires { p.proximity; }) set = offer("proximity", p.proximity) || set;
    if constexpr (requires { p.residual; }) set = offer("residual", p.residual) || set;
    if constexpr (requires { p.alpha; }) set = offer("alpha", p.alpha) || set;
    if constexpr (requires { p.decay; }) set = offer("decay", p.decay) || set;
    if constexpr (requires { p.share; }) set = offer("share", p.share) || set;
    if constexpr (requires { p.prompt.ridge; }) {
      set = offer("rounds", p.prompt.rounds) || set;
      set = offer("floor", p.prompt.floor) || set;
      set = offer("ridge", p.prompt.ridge) || set;
      set = offer("queries", p.decode.queries) || set;
      set = offer("stride", p.decode.stride) || set;
      set = offer("period", p.decode.period) || set;
    }
    return set;
  });
  require(found, "--policies: " + to.name + ": one of " + (known.empty() ? "nothing" : known) +
                     " expected, '" + name + "' came");
  try {
    kvfold::traits::validate(to.policy);
  } catch (const kvfold::invalid_argument& e) {
    throw usage_error(std::string("--policies: ") + e.what());
  }
}

inline query_source parse_source(const std::string& word) {
  const std::string names[] = {"own", "window", "spread", "foresight"};
  const auto* const found = std::ranges::find(names, word);
  require(found != std::end(names),
          "--policies: @own, @window, @spread or @foresight expected, '@" + word + "' came");
  return static_cast<query_source>(found - names);
}

inline named_policy parse_policy(const std::string& word) {
  const std::string spec = word.substr(0, word.find('@'));
  const std::string name = spec.substr(0, spec.find(':'));
  const auto all = all_policies();
  const auto found = std::ranges::find(all, name, &named_policy::name);
  if (found == all.end()) {
    std::string names;
    for (const named_policy& p : all) {
      names += (names.empty() ? "" : ",") + p.name;
    }
    throw usage_error("--policies: all or some of " + names + " expected, '" + name + "' came");
  }
  named_policy p = *found;
  if (spec.size() > name.size()) {
    for (const std::string& parameter : split(spec.substr(name.size() + 1))) {
      set_parameter(p, parameter);
    }
  }
  if (word.size() > spec.size()) {
    p.queries = parse_source(word.substr(spec.size() + 1));
  }
  p.name = word;
  return p;
}

/// Names with commas between; a word that is no name but `parameter=value` belongs to the policy
/// before it.
inline std::vector<named_policy> parse_policies(const std::string& list) {
  if (list == "all") {
    return all_policies();
  }
  std::vector<std::string> names;
  for (const std::string& word : split(list)) {
    const bool parameter =
        word.find('=') != std::string::npos && word.find(':') == std::string::npos;
    if (parameter && !names.empty()) {
      names.back() += "," + word;
    } else if (std::ranges::find(names, word) == names.end()) {
      names.push_back(word);
    }
  }
  require(!names.empty(), "--policies: at least one expected, none came");
  std::vector<named_policy> chosen;
  for (const std::string& name : names) {
    chosen.push_back(parse_policy(name));
  }
  return chosen;
}

}  // namespace detail
}  // namespace evaluate
