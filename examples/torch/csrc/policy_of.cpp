// SPDX-License-Identifier: MIT
// Policies from their text, budgets from lists and from scores.
#include <charconv>    // std::from_chars
#include <cmath>       // std::abs
#include <functional>  // std::less
#include <map>
#include <string>

#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/make_policy.hpp"
#include "operators.hpp"

namespace kvmeld_torch {

kvmeld::rotary rope_of(std::span<const double> rope) {
  kvmeld::expects(rope.empty() || rope.size() == 1 || rope.size() == 5,
                  "rope: expected [], [base] or [base, factor, low, high, original context], got ",
                  rope.size(), " numbers");
  if (rope.empty()) {
    return {};
  }
  const auto plain = kvmeld::rotary::halves(rope[0]);
  if (rope.size() == 1) {
    return plain;
  }
  kvmeld::expects(rope[4] >= 1 && rope[4] < 1e9,
                  "rope: expected an original context of 1 to 1e9, got ", rope[4]);
  return plain.llama3({rope[1], rope[2], rope[3], static_cast<index_t>(rope[4])});
}

const kvmeld::any_policy& policy_of(std::string_view text) {
  thread_local std::map<std::string, kvmeld::any_policy, std::less<>> made;
  auto at = made.find(text);
  if (at == made.end()) {
    const std::size_t slash = text.find('/');
    kvmeld::any_policy policy = kvmeld::make_policy(text.substr(0, slash));
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

std::vector<std::int64_t> divide(const kvmeld::any_policy& policy, std::span<const float> scores,
                                 index_t heads, index_t slots) {
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
