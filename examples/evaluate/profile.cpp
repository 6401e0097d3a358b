// SPDX-License-Identifier: MIT
#include "evaluate/profile.hpp"

#include <fmt/format.h>

#include <fstream>

#include "evaluate/attention_error.hpp"

namespace evaluate {

namespace {

/// `f` on each contender whose heads share the model's slots.
template <class Plan, class F>
void for_each_sharing(Plan& todo, F f) {
  for (auto& g : todo.groups) {
    for (auto& e : g.entries) {
      if (is_shared(e.chosen.budgets) && e.refusal.empty()) {
        f(e.chosen);
      }
    }
  }
}

}  // namespace

bool load_profile(plan& todo, const std::filesystem::path& file, index_t heads, index_t tokens) {
  std::ifstream in(file, std::ios::binary);
  if (!in.is_open()) {
    for_each_sharing(todo, [](const contender& c) {
      detail::require(c.budgets != budget_allocation::profile,
                      "--policies: +profile: expected --profile with an existing file");
    });
    return false;
  }
  auto loaded = std::make_shared<kvmeld::budget_profile>(heads);
  try {
    load(in, *loaded);
  } catch (const kvmeld::error& e) {
    throw usage_error(fmt::format("--profile: '{}': {}", file.string(), e.what()));
  }
  for_each_sharing(todo, [&](contender& c) {
    c.profile = loaded;
    c.of_heads = share_clusters(c.policy, *loaded, tokens);
  });
  return true;
}

const contender& profiled(const plan& todo) {
  const contender* one = nullptr;
  int count = 0;
  for_each_sharing(todo, [&](const contender& c) { one = &c, ++count; });
  detail::require(count == 1,
                  fmt::format("--profile: to make the file, expected one policy by a "
                              "global threshold (fold, kvzip, +global) at one budget, got {}",
                              count));
  return *one;
}

void save_profile(const contender& c, const engine::decoder& model,
                  const std::vector<text_prompt>& prompts, const std::filesystem::path& file,
                  const workers& on) {
  kvmeld::budget_profile made(model.shape().layers * model.shape().kv_heads);
  for (const text_prompt& p : prompts) {
    made.add(shared_budgets(c, p.read.tokens, p.read.measured[c.index].heads));
    made.add_errors(errors_of_heads(c, model, p, on));
  }
  std::ofstream out(file, std::ios::binary);
  detail::require(out.is_open(),
                  "--profile: expected a file to write, got '" + file.string() + "'");
  save(out, made);
}

}  // namespace evaluate
