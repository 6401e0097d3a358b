// SPDX-License-Identifier: MIT
#include "evaluate/policies.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>  // std::ranges::find
#include <array>
#include <sstream>  // std::istringstream

namespace evaluate {

any_policy named_policy::measuring() const {
  any_policy measured = policy;
  measured.visit([&](auto& p) {
    if constexpr (requires { p.pins = kvmeld::fold::pin_rule::scores; }) {
      p.pins = is_shared(budgets) ? kvmeld::fold::pin_rule::scores : p.pins;
    }
    if constexpr (requires { p.share_slots = index_t{1}; }) {
      p.share_slots = is_shared(budgets) ? 1 : 0;  // a column more; its budgets say which numbers
    }
    if constexpr (requires { p.measures_shares = true; }) {
      p.measures_shares = is_shared(budgets);
    }
  });
  return measured;
}

query_source source_of(const any_policy& policy) {
  using planned = kvmeld::prompt_use::planned;
  const planned plans = kvmeld::declared(policy).prompt_use().plans;
  return scored_as(policy) == kvmeld::kvzip::name() ? query_source::replay
         : plans == planned::lookahead              ? query_source::lookahead
         : plans == planned::spread                 ? query_source::spread
                                                    : query_source::own;
}

namespace {

/// A policy as its name alone says.
named_policy by_itself(const any_policy& p) {
  const bool shares = p.name() == kvmeld::fold::name() || p.name() == kvmeld::kvmerger::name() ||
                      scored_as(p) == kvmeld::kvzip::name();
  return {.name = std::string(p.name()),
          .policy = p,
          .queries = source_of(p),
          .budgets = shares ? budget_allocation::global : budget_allocation::uniform};
}

/// Which of the names `word` is, behind `sign`; `all` is what stands there.
template <class Choice, std::size_t N>
Choice chosen(char sign, const std::array<const char*, N>& names, const std::string& word,
              const std::string& all) {
  const auto found = std::ranges::find(names, word);
  detail::require(found != names.end(),
                  fmt::format("--policies: expected {0}{1} or {0}{2}, got '{0}{3}'", sign,
                              fmt::join(names.begin(), names.end() - 1, std::string(", ") + sign),
                              names.back(), all));
  return static_cast<Choice>(found - names.begin());
}

/// "lookahead" or "lookahead:900", which takes so many queries.
void set_source(named_policy& p, const std::string& word) {
  constexpr std::array names = {"own", "window", "spread", "replay", "lookahead", "surrogate"};
  const std::string name = word.substr(0, word.find(':'));
  p.queries = chosen<query_source>('@', names, name, word);
  const bool by_surrogate = p.queries == query_source::surrogate;
  detail::require(!by_surrogate || scored_as(p.policy) == kvmeld::kvzip::name(),
                  "--policies: @surrogate: expected kvzip, got " + p.name);
  if (name.size() < word.size()) {
    detail::require(CLI::detail::lexical_cast(word.substr(name.size() + 1), p.queries_taken) &&
                        p.queries_taken > 0 && p.queries != query_source::own && !by_surrogate,
                    "--policies: expected @window, @spread, @replay or @lookahead:queries, got '@" +
                        word + "'");
  }
}

void set_division(named_policy& p, const std::string& word) {
  constexpr std::array names = {"equal",      "pyramid_kv", "pyramid_infer", "d2o",
                                "d2o_exempt", "ada_kv",     "duo_attention", "global",
                                "composite",  "union",      "profile"};
  p.budgets = chosen<budget_allocation>('+', names, word, word);
  const bool by_scores = p.budgets == budget_allocation::d2o ||
                         p.budgets == budget_allocation::d2o_exempt ||
                         p.budgets == budget_allocation::ada_kv;
  // Where no budget is shared, some have no scores that heads share by.
  const bool scores = p.policy.visit([&](const auto& one) {
    return kvmeld::declared(one).shares() && !(by_scores && requires { one.sharing(1, 1); });
  });
  detail::require(!(by_scores || is_shared(p.budgets)) || scores,
                  "--policies: +" + word + ": expected a policy that scores slots, got " + p.name);
}

/// No division, but part of a policy's name.
constexpr std::string_view fold_suffix = "+massfold";

/// What `word` has from `sign` on, which is taken off.
std::string cut(std::string& word, std::size_t at) {
  const std::string tail = word.substr(std::min(at, word.size()));
  word.resize(word.size() - tail.size());
  return tail;
}

}  // namespace

std::vector<named_policy> all_policies() {
  std::vector<named_policy> list;
  for (const any_policy& p : any_policy::every()) {
    list.push_back(by_itself(p));
  }
  for (const char* const name :
       {"full_cache/half", "full_cache/q8_0", "full_cache/k8v4", "full_cache/k6v4",
        "full_cache/k4v4", "full_cache/q4_0", "fold+equal", "snapkv+pyramid_kv",
        "snapkv+pyramid_infer", "snapkv+ada_kv", "streaming_llm+duo_attention", "d2o+d2o"}) {
    list.push_back(detail::parse_policy(name));
  }
  return list;
}

namespace detail {

std::vector<std::string> split(const std::string& list, char by) {
  std::vector<std::string> words;
  std::string word;
  for (std::istringstream in(list); std::getline(in, word, by);) {
    words.push_back(word);
  }
  return words;
}

named_policy parse_policy(const std::string& word) {
  std::string spec = word;
  const std::string held_as = cut(spec, spec.find('/')), source = cut(spec, spec.find('@'));
  const std::size_t last = spec.rfind('+');
  const bool folds = last != spec.npos && spec.compare(last, fold_suffix.size(), fold_suffix) == 0;
  const std::string division = folds ? "" : cut(spec, last);
  const std::string name = spec.substr(0, spec.find(':')), scorer = name.substr(0, name.find('+'));
  const auto known = any_policy::every();
  if (std::ranges::find(known, scorer, &any_policy::name) == known.end()) {
    std::vector<std::string> names;
    for (const named_policy& p : all_policies()) {
      names.push_back(p.name);
    }
    throw usage_error(fmt::format("--policies: expected all or some of {}, got '{}'",
                                  fmt::join(names, ","), name));
  }
  const auto made = [](auto make) {
    try {
      return make();
    } catch (const kvmeld::error& e) {
      throw usage_error(std::string("--policies: ") + e.what());
    }
  };
  named_policy p = by_itself(made([&] { return kvmeld::make_policy<any_policy>(spec); }));
  if (!division.empty()) {
    set_division(p, division.substr(1));
  }
  if (!source.empty()) {
    set_source(p, source.substr(1));
  }
  if (!held_as.empty()) {
    p.storage = made([&] { return kvmeld::make_storage(held_as.substr(1)); });
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

}  // namespace detail

std::vector<any_policy> share_clusters(const any_policy& policy,
                                       const kvmeld::budget_profile& profile, index_t tokens) {
  return policy.visit([&](const auto& one) -> std::vector<any_policy> {
    if constexpr (requires { one.slots_beside_pins(); }) {
      if (one.clusters > 0 && profile.has_errors()) {
        constexpr index_t least = 2;
        std::vector<any_policy> policies;
        for (const index_t clusters :
             profile.by_errors(profile.heads() * one.clusters, least, tokens / 2)) {
          auto of_head = one;
          of_head.clusters = clusters;
          policies.push_back(of_head);
        }
        return policies;
      }
    }
    return {};
  });
}

}  // namespace evaluate
