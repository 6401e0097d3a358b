// SPDX-License-Identifier: MIT
/// `--profile`: how a model's heads share its slots, in a file. It is made of the thresholds of a
/// run's prompts and of the errors behind them. In a later run `+profile` divides by it in place of
/// a threshold, and clusters of fold go by the errors.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <fstream>

#include "evaluate/attention_error.hpp"
#include "evaluate/compressed_cache.hpp"
#include "evaluate/dataset.hpp"
#include "evaluate/plan.hpp"

namespace evaluate {

/// Contenders whose heads share the model's slots.
template <class Plan>
auto sharing(Plan& todo) {
  std::vector<decltype(&entries_of(todo).front()->chosen)> all;
  for (auto* const e : entries_of(todo)) {
    if (is_shared(e->chosen.budgets) && e->refusal.empty() &&
        e->chosen.budgets != budget_allocation::composite &&  // a layer's heads are alike
        e->chosen.budgets != budget_allocation::same_tokens) {
      all.push_back(&e->chosen);
    }
  }
  return all;
}

/// Gives the profile in `file`, of so many heads, to every contender whose heads share the model's
/// slots, for prompts of `tokens`; false: there is no such file. Throws `usage_error`: something
/// else, another model's, no file and a contender that needs one.
inline bool load_profile(plan& todo, const std::filesystem::path& file, index_t heads,
                         index_t tokens) {
  std::ifstream in(file, std::ios::binary);
  if (!in.is_open()) {
    for (const contender* const c : sharing(todo)) {
      detail::require(c->budgets != budget_allocation::profile,
                      "--policies: +profile: expected --profile with an existing file");
    }
    return false;
  }
  auto loaded = std::make_shared<kvmeld::budget_profile>(heads);
  try {
    load(in, *loaded);
  } catch (const kvmeld::error& e) {
    throw usage_error(fmt::format("--profile: '{}': {}", file.string(), e.what()));
  }
  for (contender* const c : sharing(todo)) {
    c->profile = loaded;
    c->of_heads = share_clusters(c->policy, *loaded, tokens);
  }
  return true;
}

/// The one contender whose thresholds a file can be made of. Throws `usage_error`: none, several.
inline const contender& profiled(const plan& todo) {
  const auto all = sharing(todo);
  detail::require(all.size() == 1,
                  fmt::format("--profile: to make the file, expected one policy by a "
                              "global threshold (fold, kvzip, +global) at one budget, got {}",
                              all.size()));
  return *all.front();
}

/// Makes `file` of the thresholds of the prompts, and of what heads' errors weigh behind them.
inline void save_profile(const contender& c, const engine::decoder& model,
                         const std::vector<text_prompt>& prompts, const std::filesystem::path& file,
                         const workers& on) {
  kvmeld::budget_profile made(model.shape().full_heads());
  for (const text_prompt& p : prompts) {
    kvmeld::cache kv = p.read.cache();
    made.add(shared_budgets(c, kv, states_of(c, p.read, kv)));
    made.add_errors(errors_of_heads(c, model, p, on));
  }
  std::ofstream out(file, std::ios::binary);
  detail::require(out.is_open(),
                  "--profile: expected a file to write, got '" + file.string() + "'");
  save(out, made);
}

}  // namespace evaluate
