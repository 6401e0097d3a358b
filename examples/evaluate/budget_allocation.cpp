#include "evaluate/budget_allocation.hpp"

#include <algorithm>  // std::min, std::ranges::min_element
#include <array>
#include <cstdint>

#include "kvfold/global_budgets.hpp"
#include "kvfold/layer_budgets.hpp"

namespace evaluate {

namespace {

/// One threshold over all heads of all layers: what each of them gets of the slots that lie between
/// the sinks and the latest, `[layers · KV heads]`. `alone`: slots that every head has beside them;
/// `sinks` of them lie at the beginning, `latest` at the end of the prompt.
std::vector<index_t> one_threshold(const any_policy& p, index_t slots, index_t alone, index_t sinks,
                                   index_t latest,
                                   const std::vector<std::vector<kvfold::head_state>>& measured) {
  const index_t column = score_column(p);
  std::vector<float> scores;
  index_t heads = 0, tokens = 0;
  for (const auto& layer : measured) {
    for (const kvfold::head_state& s : layer) {
      tokens = s.length();
      const auto of_head = s.column(column).subspan(
          static_cast<std::size_t>(sinks), static_cast<std::size_t>(tokens - sinks - latest));
      scores.insert(scores.end(), of_head.begin(), of_head.end());
      ++heads;
    }
  }
  return kvfold::global_budgets(scores, heads, heads * (slots - alone), tokens - alone - 1);
}

/// No policy can do without one slot more than what it protects: the heads that have most give.
void at_least(index_t least, std::vector<index_t>& budgets) {
  for (auto fewest = std::ranges::min_element(budgets); *fewest < least;
       fewest = std::ranges::min_element(budgets)) {
    ++*fewest, --*std::ranges::max_element(budgets);
  }
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

std::vector<budget> allocate_budgets(budget_allocation d, const any_policy& p, index_t slots,
                                     index_t tokens,
                                     const std::vector<std::vector<kvfold::head_state>>& measured,
                                     std::span<const char> whole, std::size_t layer) {
  const auto layers = static_cast<index_t>(measured.size());
  const auto heads = static_cast<index_t>(measured[layer].size());
  const index_t alone = p.min_budget() - 1, total = layers * (slots - alone);
  std::vector<budget> limits(static_cast<std::size_t>(heads), budget{slots});
  if (slots >= tokens) {
    return limits;
  }
  const auto all_heads = [&](const std::vector<index_t>& of_layers) {
    std::fill(limits.begin(), limits.end(), budget{alone + of_layers[layer]});
  };
  switch (d) {
    case budget_allocation::uniform:
      break;
    case budget_allocation::pyramid_kv:
      all_heads(kvfold::pyramid_kv(layers, tokens - alone, total));
      break;
    case budget_allocation::pyramid_infer:
      all_heads(kvfold::pyramid_infer(layers, tokens - alone, total));
      break;
    case budget_allocation::d2o: {
      std::vector<double> variances;
      for (const auto& states : measured) {
        for (const kvfold::head_state& s : states) {
          variances.push_back(kvfold::variance(s.column(0)));
        }
      }
      all_heads(kvfold::layer_budgets(variances, layers, tokens - alone, total));
      break;
    }
    case budget_allocation::duo_attention: {
      const std::int64_t all = std::ranges::count(whole, 1), count = std::int64_t{layers} * heads;
      const auto rest = static_cast<index_t>((slots * count - all * tokens) / (count - all));
      for (std::size_t h = 0; h < limits.size(); ++h) {
        limits[h] = budget{whole[layer * limits.size() + h] != 0 ? tokens : rest};
      }
      break;
    }
    case budget_allocation::global: {
      // fold has clusters beside its pins and may do without any.
      const index_t sinks = std::min(alone, index_t{4});
      const auto [beside, latest, least] = p.visit([&](const auto& one) {
        if constexpr (requires { one.slots_beside_pins(); }) {
          return std::array{alone + 1, one.prompt_recent, index_t{0}};
        } else {
          return std::array{alone, alone - sinks, index_t{1}};
        }
      });
      auto more = one_threshold(p, slots, beside, sinks, latest, measured);
      at_least(least, more);
      for (std::size_t h = 0; h < limits.size(); ++h) {
        limits[h] = budget{beside + more[layer * limits.size() + h]};
      }
      break;
    }
    case budget_allocation::ada_kv: {
      // Between the sinks and the latest, which every head keeps.
      const auto first = static_cast<std::size_t>(std::min(alone, index_t{4}));
      const auto count = static_cast<std::size_t>(tokens - alone);
      std::vector<float> scores;
      for (const kvfold::head_state& s : measured[layer]) {
        const auto column = s.column(0).subspan(first, count);
        scores.insert(scores.end(), column.begin(), column.end());
      }
      auto more = kvfold::ada_budgets(scores, heads, heads * (slots - alone));
      at_least(1, more);
      for (std::size_t h = 0; h < limits.size(); ++h) {
        limits[h] = budget{alone + more[h]};
      }
      break;
    }
  }
  return limits;
}

}  // namespace evaluate
