// SPDX-License-Identifier: MIT
// Policies from their text, budgets from lists and from scores.
#include <charconv>    // std::from_chars
#include <cmath>       // std::abs
#include <functional>  // std::less
#include <map>
#include <string>

#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/peers.hpp"
#include "operators.hpp"

namespace kvmeld_torch {

void read_terms(std::span<const double> numbers, kvmeld::attention_spec& spec) {
  const auto taken = [&](std::size_t count) {
    kvmeld::expects(count <= numbers.size(), "terms: expected ", count, " more numbers, got ",
                    numbers.size());
    const auto first = numbers.first(count);
    numbers = numbers.subspan(count);
    return first;
  };
  const auto list = [&] {
    const double length = taken(1)[0];
    kvmeld::expects(length >= 0 && length <= 1e6, "terms: expected a length of 0 to 1e6, got ",
                    length);
    return taken(static_cast<std::size_t>(length));
  };
  using pairing = kvmeld::rotary::pairing;
  const auto head = taken(3);
  spec.soft_cap = static_cast<float>(head[0]);
  if (const auto frequencies = list(); !frequencies.empty()) {
    spec.rope =
        kvmeld::rotary::table(frequencies, head[1] == 0 ? pairing::halves : pairing::interleaved);
    spec.rope = head[2] == 0 ? spec.rope : spec.rope.last();
  }
  for (std::vector<float>* const of_heads : {&spec.sink_logits, &spec.alibi_slopes}) {
    const auto given = list();
    of_heads->assign(given.begin(), given.end());
    if (!given.empty()) {
      const auto heads = static_cast<index_t>(given.size()) / spec.group;
      kvmeld::expects(heads > 0 && spec.kv_heads % heads == 0,
                      "terms: expected a number for each query head of a sequence, some of ",
                      spec.query_heads(), ", got ", given.size());
      spec.kv_heads = heads;
    }
  }
  kvmeld::expects(numbers.empty(), "terms: expected no more numbers, got ", numbers.size());
}

const kvmeld::any_policy_or_peer& policy_of(std::string_view text) {
  thread_local std::map<std::string, kvmeld::any_policy_or_peer, std::less<>> made;
  auto at = made.find(text);
  if (at == made.end()) {
    const std::size_t slash = text.find('/');
    kvmeld::any_policy_or_peer policy =
        kvmeld::make_policy<kvmeld::any_policy_or_peer>(text.substr(0, slash));
    if (slash != text.npos) {
      const std::string_view given = text.substr(slash + 1);
      index_t slots = 0;
      const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), slots);
      kvmeld::expects(error == std::errc() && end == given.data() + given.size() && slots >= 1 &&
                          slots < 1'000'000'000,
                      policy.name(), ": expected policy/slots with 1 to 1e9 slots to share, got '",
                      text, "'");
      policy = kvmeld::for_shared(policy, slots);
    }
    at = made.emplace(std::string(text), policy).first;
  }
  return at->second;
}

std::vector<kvmeld::budget> budgets_of(index_t heads, std::span<const std::int64_t> targets,
                                       std::span<const std::int64_t> triggers) {
  const auto n = static_cast<std::size_t>(heads);
  kvmeld::expects(targets.size() == 1 || targets.size() == n,
                  "budget: expected 1 or one for each of ", heads, " heads, got ", targets.size());
  kvmeld::expects(triggers.empty() || triggers.size() == targets.size(),
                  "trigger: expected none or ", targets.size(), " (one per budget), got ",
                  triggers.size());
  const auto slots = [](const char* what, std::int64_t x) {
    kvmeld::expects(x >= 0 && x <= std::numeric_limits<index_t>::max(), what,
                    ": expected at least 0 slots, got ", x);
    return static_cast<index_t>(x);
  };
  std::vector<kvmeld::budget> all;
  for (std::size_t h = 0; h < n; ++h) {
    const std::size_t i = targets.size() == 1 ? 0 : h;
    all.push_back(
        {slots("budget", targets[i]), triggers.empty() ? 0 : slots("trigger", triggers[i])});
  }
  return all;
}

std::vector<std::int64_t> divide(const kvmeld::any_policy_or_peer& policy,
                                 std::span<const float> scores, index_t heads, index_t slots) {
  constexpr float all = std::numeric_limits<float>::infinity();
  const std::size_t width = scores.size() / static_cast<std::size_t>(heads);
  std::vector<std::vector<float>> of_heads;
  index_t longest = 0;
  for (index_t h = 0; h < heads; ++h) {
    std::vector<float>& of_head = of_heads.emplace_back();
    index_t length = 0;
    for (const float x : scores.subspan(static_cast<std::size_t>(h) * width, width)) {
      length += x == -all ? 0 : 1;
      if (std::abs(x) != all) {
        of_head.push_back(x);
      }
    }
    longest = std::max(longest, length);
  }
  const auto divided =
      kvmeld::divide_slots(of_heads, kvmeld::shared_slots::of(policy), slots, longest);
  return {divided.begin(), divided.end()};
}

}  // namespace kvmeld_torch
