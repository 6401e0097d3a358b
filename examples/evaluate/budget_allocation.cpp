// SPDX-License-Identifier: MIT
#include "evaluate/budget_allocation.hpp"

#include <algorithm>  // std::min, std::ranges::min_element
#include <cstdint>

#include "kvmeld/compress/global_budgets.hpp"
#include "kvmeld/compress/layer_budgets.hpp"

namespace evaluate {

namespace {

/// How the slots of one threshold over the model lie.
struct shared_slots {
  index_t alone;   ///< that every head has beside them
  index_t sinks;   ///< of these at the beginning of the prompt,
  index_t latest;  ///< and at its end
  index_t least;   ///< of the shared ones, that no head can do without

  /// fold has clusters beside its pins, and may do without any.
  static shared_slots of(const any_policy& p) {
    const index_t least = p.min_budget(), sinks = std::min(least - 1, index_t{4});
    return p.visit([&](const auto& one) {
      if constexpr (requires { one.slots_beside_pins(); }) {
        return shared_slots{least, sinks, one.prompt_recent, 0};
      } else {
        return shared_slots{least - 1, sinks, least - 1 - sinks, 1};
      }
    });
  }
};

/// No policy can do without one slot more than what it protects: the heads that have most give.
void at_least(index_t least, std::vector<index_t>& budgets) {
  for (auto fewest = std::ranges::min_element(budgets); *fewest < least;
       fewest = std::ranges::min_element(budgets)) {
    ++*fewest, --*std::ranges::max_element(budgets);
  }
}

/// The budgets of a layer's heads, by what each of all heads has `more` than what it has alone.
std::vector<budget> shared_by_heads(const contender& c, std::vector<index_t> more,
                                    std::size_t layer, index_t heads) {
  at_least(shared_slots::of(c.policy).least, more);
  std::vector<budget> limits;
  for (index_t h = 0; h < heads; ++h) {
    const auto all = layer * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h);
    limits.push_back(budget{shared_slots::of(c.of_head(layer, h, heads)).alone + more[all]});
  }
  return limits;
}

}  // namespace

index_t whole_heads(index_t heads, index_t slots, index_t tokens, index_t least) {
  const auto enough = [&](index_t whole) {
    return std::int64_t{slots} * heads - std::int64_t{whole} * tokens >=
           std::int64_t{heads - whole} * std::max(least, slots / 4);
  };
  index_t whole = 0;
  while (whole + 1 < heads && enough(whole + 1)) {
    ++whole;
  }
  return whole;
}

std::vector<index_t> shared_budgets(const contender& c, index_t tokens,
                                    const measured_heads& measured) {
  const auto shared = shared_slots::of(c.policy);
  index_t alone = shared.alone;  // of the head that has most
  for (const any_policy& p : c.of_heads) {
    alone = std::max(alone, shared_slots::of(p).alone);
  }
  const index_t mean = c.limit.slots - shared.alone, most = tokens - alone - 1;
  if (c.budgets == budget_allocation::profile) {
    return c.profile->budgets(c.profile->heads() * mean, most);
  }
  const index_t column = score_column(c.policy);
  std::vector<float> scores;
  index_t heads = 0;
  for (const auto& layer : measured) {
    for (const kvmeld::head_state& s : layer) {
      const auto of_head =
          s.column(column).subspan(static_cast<std::size_t>(shared.sinks),
                                   static_cast<std::size_t>(tokens - shared.sinks - shared.latest));
      scores.insert(scores.end(), of_head.begin(), of_head.end());
      ++heads;
    }
  }
  return kvmeld::global_budgets(scores, heads, heads * mean, most);
}

std::vector<budget> allocate_budgets(const contender& c, index_t tokens,
                                     const measured_heads& measured, std::size_t layer) {
  const index_t slots = c.limit.slots;
  const auto layers = static_cast<index_t>(measured.size());
  const auto heads = static_cast<index_t>(measured[layer].size());
  const index_t alone = c.policy.min_budget() - 1, total = layers * (slots - alone);
  std::vector<budget> limits(static_cast<std::size_t>(heads), budget{slots});
  if (slots >= tokens) {
    return limits;
  }
  const auto all_heads = [&](const std::vector<index_t>& of_layers) {
    std::fill(limits.begin(), limits.end(), budget{alone + of_layers[layer]});
  };
  switch (c.budgets) {
    case budget_allocation::uniform:
      break;
    case budget_allocation::pyramid_kv:
      all_heads(kvmeld::pyramid_kv(layers, tokens - alone, total));
      break;
    case budget_allocation::pyramid_infer:
      all_heads(kvmeld::pyramid_infer(layers, tokens - alone, total));
      break;
    case budget_allocation::d2o: {
      std::vector<double> variances;
      for (const auto& states : measured) {
        for (const kvmeld::head_state& s : states) {
          variances.push_back(kvmeld::variance(s.column(0)));
        }
      }
      all_heads(kvmeld::layer_budgets(variances, layers, tokens - alone, total));
      break;
    }
    case budget_allocation::duo_attention: {
      const std::int64_t all = std::ranges::count(c.whole, 1), count = std::int64_t{layers} * heads;
      const auto rest = static_cast<index_t>((slots * count - all * tokens) / (count - all));
      for (std::size_t h = 0; h < limits.size(); ++h) {
        limits[h] = budget{c.whole[layer * limits.size() + h] != 0 ? tokens : rest};
      }
      break;
    }
    case budget_allocation::global:
    case budget_allocation::profile:
      return shared_by_heads(c, shared_budgets(c, tokens, measured), layer, heads);
    case budget_allocation::ada_kv: {
      // Between the sinks and the latest, which every head keeps.
      const auto first = static_cast<std::size_t>(std::min(alone, index_t{4}));
      const auto count = static_cast<std::size_t>(tokens - alone);
      std::vector<float> scores;
      for (const kvmeld::head_state& s : measured[layer]) {
        const auto column = s.column(0).subspan(first, count);
        scores.insert(scores.end(), column.begin(), column.end());
      }
      auto more = kvmeld::ada_budgets(scores, heads, heads * (slots - alone));
      at_least(1, more);
      for (std::size_t h = 0; h < limits.size(); ++h) {
        limits[h] = budget{alone + more[h]};
      }
      break;
    }
  }
  return limits;
}

std::vector<budget> allocate_budgets(const contender& c, index_t tokens, index_t heads,
                                     std::size_t layer) {
  if (c.budgets == budget_allocation::uniform || c.limit.slots >= tokens) {
    return std::vector<budget>(static_cast<std::size_t>(heads), budget{c.limit.slots});
  }
  return shared_by_heads(c, shared_budgets(c, tokens, {}), layer, heads);
}

}  // namespace evaluate
