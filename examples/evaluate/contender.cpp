// SPDX-License-Identifier: MIT
#include "evaluate/contender.hpp"

#include <algorithm>  // std::clamp, std::ranges::min_element
#include <cstdint>

#include "kvmeld/compress/shared_slots.hpp"

namespace evaluate {

namespace {

using kvmeld::shared_slots;

/// No policy can do without one slot more than what it protects: the heads that have most give.
void at_least(index_t least, std::vector<index_t>& budgets) {
  for (auto fewest = std::ranges::min_element(budgets); *fewest < least;
       fewest = std::ranges::min_element(budgets)) {
    ++*fewest, --*std::ranges::max_element(budgets);
  }
}

/// All slots of heads that have `more` than what each has for itself.
std::vector<index_t> with_own(const contender& c, std::vector<index_t> more) {
  at_least(shared_slots::of(c.policy).least, more);
  for (std::size_t i = 0; i < more.size(); ++i) {
    more[i] += shared_slots::of(c.of_head(i)).own;
  }
  return more;
}

/// The columns of some heads end to end: `count` slots of each from `first` on.
std::vector<float> scores_of(std::span<const kvmeld::head_state> heads, index_t column,
                             index_t first, index_t count) {
  std::vector<float> scores;
  for (const kvmeld::head_state& s : heads) {
    const auto of_head = s.column(column).subspan(as_size(first), as_size(count));
    scores.insert(scores.end(), of_head.begin(), of_head.end());
  }
  return scores;
}

/// As `budget::shared_by_layer` divides: one threshold over the layers' composite scores, which are
/// the mean scores of heads that keep the same tokens.
std::vector<index_t> composite_budgets(const contender& c, index_t tokens,
                                       std::span<const kvmeld::head_state> measured,
                                       index_t heads) {
  const shared_slots shared = shared_slots::of(c.policy);
  std::vector<std::vector<float>> scores;
  for (const kvmeld::head_state& s : measured) {
    const auto own =
        s.column(shared.column)
            .subspan(as_size(shared.sinks), as_size(tokens - shared.sinks - shared.latest));
    scores.emplace_back(own.begin(), own.end());
  }
  return kvmeld::divide_by_layer(scores, heads, shared, c.limit.slots, tokens);
}

}  // namespace

index_t whole_heads(index_t heads, index_t slots, index_t tokens, index_t least) {
  const std::int64_t other = std::max(least, slots / 4);
  const std::int64_t whole =
      tokens > other ? heads * (slots - other) / (tokens - other) : std::int64_t{heads} - 1;
  return static_cast<index_t>(std::clamp<std::int64_t>(whole, 0, heads - 1));
}

std::vector<index_t> shared_budgets(const contender& c, index_t tokens,
                                    std::span<const kvmeld::head_state> measured) {
  const shared_slots shared = shared_slots::of(c.policy);
  index_t own = shared.own;  // of the head that has most
  for (const any_policy& p : c.of_heads) {
    own = std::max(own, shared_slots::of(p).own);
  }
  const index_t mean = c.limit.slots - shared.own, most = tokens - own - 1;
  if (c.budgets == budget_allocation::profile) {
    return c.profile->budgets(c.profile->heads() * mean, most);
  }
  const auto heads = count_of(measured);
  return kvmeld::global_budgets(
      scores_of(measured, shared.column, shared.sinks, tokens - shared.sinks - shared.latest),
      heads, heads * mean, most);
}

std::vector<index_t> allocate_slots(const contender& c, index_t tokens,
                                    std::span<const kvmeld::head_state> measured, index_t layers) {
  const index_t slots = c.limit.slots;
  const std::size_t heads = measured.size() / as_size(layers);  // of a layer
  const index_t alone = kvmeld::declared(c.policy).min_budget() - 1,
                total = layers * (slots - alone);
  std::vector<index_t> all(measured.size(), slots);
  if (slots >= tokens) {
    return all;
  }
  const auto by_layers = [&](const std::vector<index_t>& more) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = alone + more[i / heads];
    }
  };
  switch (c.budgets) {
    case budget_allocation::uniform:
      break;
    case budget_allocation::pyramid_kv:
      by_layers(kvmeld::pyramid_kv(layers, tokens - alone, total));
      break;
    case budget_allocation::pyramid_infer:
      by_layers(kvmeld::pyramid_infer(layers, tokens - alone, total));
      break;
    case budget_allocation::d2o:
    case budget_allocation::d2o_exempt: {
      std::vector<double> variances;
      for (const kvmeld::head_state& s : measured) {
        variances.push_back(kvmeld::variance(s.column(0)));
      }
      // The others' budget is what it was without the exempt layers, which keep all besides.
      const auto exempt = c.budgets == budget_allocation::d2o ? std::vector<index_t>()
                                                              : kvmeld::d2o_exempt_layers(layers);
      by_layers(kvmeld::layer_budgets(variances, layers, tokens - alone,
                                      total + count_of(exempt) * (tokens - slots), exempt));
      break;
    }
    case budget_allocation::duo_attention: {
      const std::int64_t whole = std::ranges::count(c.whole, 1),
                         count = static_cast<std::int64_t>(all.size());
      const auto rest = static_cast<index_t>((slots * count - whole * tokens) / (count - whole));
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i] = c.keeps_all(i) ? tokens : rest;
      }
      break;
    }
    case budget_allocation::composite:
    case budget_allocation::same_tokens:
      return composite_budgets(c, tokens, measured, static_cast<index_t>(heads));
    case budget_allocation::global:
    case budget_allocation::profile:
      return with_own(c, shared_budgets(c, tokens, measured));
    case budget_allocation::ada_kv:
      for (std::size_t first = 0; first < all.size(); first += heads) {
        // Between the sinks and the latest, which every head keeps.
        const auto n = static_cast<index_t>(heads);
        auto more = kvmeld::ada_budgets(scores_of(measured.subspan(first, heads), 0,
                                                  std::min(alone, index_t{4}), tokens - alone),
                                        n, n * (slots - alone));
        at_least(1, more);
        for (std::size_t h = 0; h < heads; ++h) {
          all[first + h] = alone + more[h];
        }
      }
      break;
  }
  return all;
}

std::vector<index_t> allocate_slots(const contender& c, index_t tokens, index_t heads) {
  return c.budgets == budget_allocation::uniform || c.limit.slots >= tokens
             ? std::vector<index_t>(as_size(heads), c.limit.slots)
             : with_own(c, shared_budgets(c, tokens, {}));
}

}  // namespace evaluate
