// Policies from their text, and budgets from lists.
#include <map>
#include <string>
#include <utility>  // std::pair

#include "operators.hpp"

namespace kvmeld_torch {

kvmeld::rope rope_of(std::span<const double> rope) {
  kvmeld::expects(rope.empty() || rope.size() == 1 || rope.size() == 5,
                  "rope: expected [], [base] or [base, factor, low, high, original context], got ",
                  rope.size(), " numbers");
  kvmeld::rope out;
  if (!rope.empty()) {
    kvmeld::expects(rope[0] > 1, "rope: expected a base above 1, got ", rope[0]);
    out.base = rope[0];
  }
  if (rope.size() == 5) {
    kvmeld::expects(
        rope[1] > 0 && rope[3] > rope[2] && rope[4] >= 1 && rope[4] < 1e9,
        "rope: expected a factor above 0, a high above a low factor and an original context of at "
        "least 1, got ",
        rope[1], ", ", rope[3], ", ", rope[2], ", ", rope[4]);
    out.llama3 = kvmeld::llama3_scaling{rope[1], rope[2], rope[3], static_cast<index_t>(rope[4])};
  }
  return out;
}

const kvmeld::any_policy& policy_of(std::string_view text, std::span<const double> rope) {
  using key = std::pair<std::string, std::vector<double>>;
  thread_local std::map<key, kvmeld::any_policy> made;
  key wanted(std::string(text), std::vector<double>(rope.begin(), rope.end()));
  auto at = made.find(wanted);
  if (at == made.end()) {
    auto policy = kvmeld::make_policy(text);
    policy.visit([&](auto& p) {
      if constexpr (requires { p.rope = rope_of(rope); }) {
        p.rope = rope_of(rope);
      }
    });
    at = made.emplace(std::move(wanted), std::move(policy)).first;
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

}  // namespace kvmeld_torch
