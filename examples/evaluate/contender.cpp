// SPDX-License-Identifier: MIT
#include "evaluate/contender.hpp"

#include <algorithm>  // std::clamp, std::ranges::min_element
#include <cstdint>

#include "evaluate/divisions.hpp"
#include "kvmeld/compress/shared_slots.hpp"

namespace evaluate {

namespace {

using kvmeld::shared_slots;

/// What each of some heads shares slots by, of those between the sinks and the latest. `kv` holds a
/// prompt.
std::vector<std::vector<float>> scores_of(const contender& c, kvmeld::cache& kv,
                                          std::span<const index_t> heads,
                                          std::span<const kvmeld::head_state> measured,
                                          const shared_slots& shared) {
  std::vector<std::vector<float>> scores(heads.size());
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const kvmeld::head_ref head = kv.head(heads[i]);
    std::vector<float> of_slots(as_size(head.length()));
    kvmeld::declared(c.policy).shared_scores(head, measured[i], of_slots);
    kvmeld::add_shared_scores(head, of_slots, shared, scores[i]);
  }
  return scores;
}

/// No policy can do without one slot more than what it protects: the heads that have most give.
void at_least(index_t least, std::span<index_t> budgets) {
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

/// What a profile gives each head in addition to what all have.
std::vector<index_t> by_profile(const contender& c, index_t tokens) {
  index_t own = shared_slots::of(c.policy).own;
  const index_t mean = c.limit.slots - own;
  for (const any_policy& p : c.of_heads) {
    own = std::max(own, shared_slots::of(p).own);
  }
  return c.profile->budgets(c.profile->heads() * mean, tokens - own - 1);
}

}  // namespace

index_t whole_heads(index_t heads, index_t slots, index_t tokens, index_t least) {
  const std::int64_t other = std::max(least, slots / 4);
  const std::int64_t whole =
      tokens > other ? heads * (slots - other) / (tokens - other) : std::int64_t{heads} - 1;
  return static_cast<index_t>(std::clamp<std::int64_t>(whole, 0, heads - 1));
}

std::vector<index_t> full_heads(const kvmeld::cache& kv) {
  std::vector<index_t> heads;
  for (index_t layer = 0; layer < kv.layers(); ++layer) {
    for (index_t h = 0; kv.spec(layer).window == 0 && h < kv.kv_heads(); ++h) {
      heads.push_back(kv.heads(layer, 0)[h]);
    }
  }
  return heads;
}

std::vector<index_t> shared_budgets(const contender& c, kvmeld::cache& kv,
                                    std::span<const kvmeld::head_state> measured) {
  const std::vector<index_t> heads = full_heads(kv);
  const index_t tokens = kv.head(heads[0]).length(), own = shared_slots::of(c.policy).own;
  if (c.budgets == budget_allocation::profile) {
    return by_profile(c, tokens);
  }
  index_t most = tokens - 1;  // of the head that has most for itself
  for (const any_policy& p : c.of_heads) {
    most = std::min(most, tokens - 1 - (shared_slots::of(p).own - own));
  }
  auto slots = kvmeld::divide_by_scores(
      c.policy, [&](std::size_t i) { return kv.head(heads[i]); },
      [&](std::size_t i) -> const kvmeld::head_state& { return measured[i]; },
      std::vector<index_t>(heads.size(), most),
      {.slots = c.limit.slots,
       .kv_heads = kv.kv_heads(),
       .by_layer = c.budgets == budget_allocation::composite ||
                   c.budgets == budget_allocation::same_tokens});
  for (index_t& n : slots) {
    n -= own;
  }
  return slots;
}

std::vector<index_t> allocate_slots(const contender& c, kvmeld::cache& kv,
                                    std::span<const kvmeld::head_state> measured) {
  const std::vector<index_t> of_all = full_heads(kv);
  const index_t slots = c.limit.slots, tokens = kv.head(of_all[0]).length(),
                layers = count_of(of_all) / kv.kv_heads();
  const std::size_t heads = as_size(kv.kv_heads());
  const index_t alone = kvmeld::declared(c.policy).min_budget() - 1,
                total = layers * (slots - alone);
  std::vector<index_t> all(of_all.size(), slots);
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
      by_layers(pyramid_kv(layers, tokens - alone, total));
      break;
    case budget_allocation::pyramid_infer:
      by_layers(pyramid_infer(layers, tokens - alone, total));
      break;
    case budget_allocation::d2o:
    case budget_allocation::d2o_exempt: {
      std::vector<double> variances;
      for (const auto& of_head : scores_of(c, kv, of_all, measured, {})) {
        variances.push_back(kvmeld::variance(of_head));
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
    case budget_allocation::global:
    case budget_allocation::profile:
      return with_own(c, shared_budgets(c, kv, measured));
    case budget_allocation::ada_kv: {
      // Between the sinks and the latest, which every head keeps.
      const index_t sinks = std::min(alone, index_t{4});
      const auto scores =
          scores_of(c, kv, of_all, measured,
                    {.own = alone, .sinks = sinks, .latest = alone - sinks, .least = 1});
      for (std::size_t first = 0; first < all.size(); first += heads) {
        std::vector<float> of_layer;
        for (std::size_t h = first; h < first + heads; ++h) {
          of_layer.insert(of_layer.end(), scores[h].begin(), scores[h].end());
        }
        auto more = ada_budgets(of_layer, kv.kv_heads(), kv.kv_heads() * (slots - alone));
        at_least(1, more);
        for (std::size_t h = 0; h < heads; ++h) {
          all[first + h] = alone + more[h];
        }
      }
      break;
    }
  }
  return all;
}

std::vector<index_t> allocate_slots(const contender& c, index_t tokens, index_t heads) {
  return c.budgets == budget_allocation::profile && c.limit.slots < tokens
             ? with_own(c, by_profile(c, tokens))
             : std::vector<index_t>(as_size(heads), c.limit.slots);
}

}  // namespace evaluate
