// SPDX-License-Identifier: MIT
#include "evaluate/names.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>  // std::ranges::find
#include <sstream>    // std::istringstream

#include "evaluate/budget_allocation.hpp"
#include "evaluate/usage.hpp"
#include "kvmeld/make_policy.hpp"

namespace evaluate::detail {

std::vector<std::string> split(const std::string& list, char by) {
  std::vector<std::string> words;
  std::string word;
  for (std::istringstream in(list); std::getline(in, word, by);) {
    words.push_back(word);
  }
  return words;
}

namespace {

/// Sets what `word` ("share=0.4") names, if the policy has it.
void set_parameter(named_policy& to, const std::string& word) {
  try {
    kvmeld::set_parameter(to.policy, word);
  } catch (const kvmeld::error& e) {
    throw usage_error(std::string("--policies: ") + e.what());
  }
}

/// "lookahead" or "lookahead:900", which takes so many queries.
void set_source(named_policy& p, const std::string& word) {
  const std::string names[] = {"own", "window", "spread", "replay", "lookahead"};
  const std::string name = word.substr(0, word.find(':'));
  const auto* const found = std::ranges::find(names, name);
  require(
      found != std::end(names),
      "--policies: expected @own, @window, @spread, @replay or @lookahead, got '@" + word + "'");
  p.queries = static_cast<query_source>(found - names);
  if (name.size() < word.size()) {
    require(CLI::detail::lexical_cast(word.substr(name.size() + 1), p.queries_taken) &&
                p.queries_taken > 0 && p.queries != query_source::own,
            "--policies: expected @window, @spread, @replay or @lookahead:queries, got '@" + word +
                "'");
  }
}

kvmeld::storage parse_storage(const std::string& word) {
  const std::string names[] = {"float32", "half", "bfloat16", "q8_0"};
  const auto* const found = std::ranges::find(names, word);
  require(found != std::end(names),
          "--policies: expected /float32, /half, /bfloat16 or /q8_0, got '/" + word + "'");
  return static_cast<kvmeld::storage>(found - names);
}

budget_allocation parse_budget_allocation(const named_policy& p, const std::string& word) {
  const auto* const found =
      std::ranges::find(budget_allocations, word, [](const auto& d) { return d.first; });
  require(
      found != budget_allocations.end(),
      "--policies: expected +equal, +pyramid_kv, +pyramid_infer, +d2o, +ada_kv, +duo_attention, "
      "+global or +profile, got '+" +
          word + "'");
  require(!by_scores(found->second) || !p.policy.slot_stats().empty(),
          "--policies: +" + word + ": expected a policy that scores slots, got " + p.name);
  return found->second;
}

}  // namespace

named_policy parse_policy(const std::string& word) {
  const std::string storage = word.substr(std::min(word.find('/'), word.size()));
  std::string spec = word.substr(0, word.size() - storage.size());
  const std::string source = spec.substr(std::min(spec.find('@'), spec.size()));
  spec.resize(spec.size() - source.size());
  const std::string divided = spec.substr(std::min(spec.rfind('+'), spec.size()));
  spec.resize(spec.size() - divided.size());
  const std::string name = spec.substr(0, spec.find(':'));
  const auto all = all_policies();
  const auto found = std::ranges::find(all, name, &named_policy::name);
  if (found == all.end()) {
    std::string names;
    for (const named_policy& p : all) {
      names += (names.empty() ? "" : ",") + p.name;
    }
    throw usage_error("--policies: expected all or some of " + names + ", got '" + name + "'");
  }
  named_policy p = *found;
  if (spec.size() > name.size()) {
    for (const std::string& parameter : split(spec.substr(name.size() + 1))) {
      set_parameter(p, parameter);
    }
  }
  if (!divided.empty()) {
    p.budgets = parse_budget_allocation(p, divided.substr(1));
  }
  if (!source.empty()) {
    set_source(p, source.substr(1));
  }
  if (!storage.empty()) {
    p.storage = parse_storage(storage.substr(1));
  }
  p.name = word;
  return p;
}

std::vector<named_policy> parse_policies(const std::string& list) {
  if (list == "all") {
    return all_policies();
  }
  std::vector<std::string> names;
  for (const std::string& word : split(list)) {
    const bool parameter = word.find('=') != std::string::npos && word.find('=') < word.find(':');
    if (parameter && !names.empty()) {
      names.back() += "," + word;
    } else if (std::ranges::find(names, word) == names.end()) {
      names.push_back(word);
    }
  }
  require(!names.empty(), "--policies: expected at least 1 policy");
  std::vector<named_policy> chosen;
  for (const std::string& name : names) {
    chosen.push_back(parse_policy(name));
  }
  return chosen;
}

}  // namespace evaluate::detail
