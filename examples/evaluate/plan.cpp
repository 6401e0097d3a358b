// SPDX-License-Identifier: MIT
#include "evaluate/plan.hpp"

#include <fmt/format.h>

#include <algorithm>  // std::max, std::ranges::find_if
#include <set>
#include <utility>  // std::move

#include "evaluate/contender.hpp"
#include "kvmeld/compress/shared_slots.hpp"

namespace evaluate {

namespace detail {

std::string refusal_of(const any_policy& p, const kvmeld::storage_pair& type, index_t slots,
                       index_t dim) {
  try {
    kvmeld::cache({.kv_heads = 1, .key_dim = dim},
                  {.capacity = 1, .keys = type.keys, .values = type.values, .newest = type.newest});
    kvmeld::check(p, budget{slots}, slots);
    return {};
  } catch (const kvmeld::error& e) {
    return kvmeld::declared(p).min_budget() > slots
               ? fmt::format("refused: needs at least {} slots", kvmeld::declared(p).min_budget())
               : fmt::format("refused: {}", e.what());
  }
}

std::pair<any_policy, std::string> holding(const named_policy& n, index_t slots, index_t room,
                                           index_t dim) {
  any_policy policy = n.measuring();
  std::string refusal = refusal_of(policy, n.storage, slots, dim);
  if (is_shared(n.budgets) && refusal.empty()) {
    try {
      policy = kvmeld::for_shared(policy, slots, room, n.budgets == budget_allocation::same_tokens);
    } catch (const kvmeld::error& too_few) {
      refusal = fmt::format("refused: {}", too_few.what());
    }
  }
  return {policy, refusal};
}

}  // namespace detail

void plan::set_whole_heads(const std::vector<index_t>& order, index_t tokens) {
  for (entry* const e : entries_of(*this)) {
    contender& c = e->chosen;
    if (c.budgets == budget_allocation::duo_attention && e->refusal.empty()) {
      const index_t count = whole_heads(count_of(order), c.limit.slots, tokens,
                                        kvmeld::declared(c.policy).min_budget());
      c.whole.assign(order.size(), 0);
      for (index_t i = 0; i < count; ++i) {
        c.whole[as_size(order[as_size(i)])] = 1;
      }
      e->refusal = count > 0 ? "" : "refused: too few slots for one head to keep all";
    }
  }
}

namespace {

/// No more memory for tokens that share entries than a budget of `slots` can use.
void set_table(any_policy& policy, index_t slots) {
  policy.visit([&](auto& p) {
    if constexpr (requires { p.table = slots; }) {
      p.table = p.table > 0 ? p.table : static_cast<index_t>(p.gamma * static_cast<float>(slots));
    }
  });
}

/// Bytes of a head's state after a prompt, with `room` slots until its next plan.
std::size_t state_bytes(const any_policy& p, index_t slots, index_t room, index_t dim,
                        index_t group) {
  const auto policy = kvmeld::declared(p);
  const std::size_t columns = policy.slot_stats().size(), memory = policy.memory(dim, group, slots);
  const kvmeld::decode_use use = policy.decode_use();
  return use.steps <= room
             ? kvmeld::head_state::bytes_at_rest(use.columns ? columns : 0, slots, use.memory)
             : sizeof(float) * (columns * as_size(slots) + memory);
}

/// The most slots of a head that take `share` of the bytes of `prompt` keys and values in 16 bits,
/// the policy's state included; 0: not one does.
index_t slots_within(const any_policy& p, const kvmeld::storage_pair& type, double share,
                     index_t prompt, index_t room, index_t dim, index_t group) {
  const double most =
      share * static_cast<double>(kvmeld::head_bytes(storage::f16, dim, dim, prompt));
  index_t fit = 0;
  for (index_t above = prompt + 1; fit + 1 < above;) {
    const index_t slots = fit + (above - fit) / 2;
    const std::size_t bytes = kvmeld::head_bytes(type, dim, dim, slots) +
                              (sizeof(float) + sizeof(index_t)) * as_size(slots) +
                              state_bytes(p, slots, room, dim, group);
    (static_cast<double>(bytes) <= most ? fit : above) = slots;
  }
  return fit;
}

std::string title_of(const budget_option& b, index_t prompt) {
  if (b.of == budget_option::unit::bytes) {
    return fmt::format("{:g} % of a 16-bit cache's bytes", 100 * b.given);
  }
  const index_t slots = b.slots(prompt);
  return b.of == budget_option::unit::share
             ? fmt::format("{:g} % of the prompt: {} slots per head", 100 * b.given, slots)
             : fmt::format("{} slots per head", slots);
}

}  // namespace

plan make_plan(const options& o, index_t text_tokens, const engine::config& shape) {
  plan p{.policies = o.policies, .full = {.index = 0, .policy = full_cache(), .limit = {o.prompt}}};
  auto full = std::ranges::find_if(p.policies, [](const named_policy& n) {
    return !kvmeld::declared(n.policy).evicts() && n.storage == storage::f32;
  });
  const bool is_shown = full != p.policies.end();
  if (!is_shown) {
    full = p.policies.insert(full, {std::string(full_cache().name()), full_cache()});
  }
  p.full.index = as_size(full - p.policies.begin());
  group whole{.title = fmt::format("all of the prompt: {} slots per head", o.prompt)};
  for (std::size_t i = 0; i < p.policies.size(); ++i) {
    const named_policy& n = p.policies[i];
    if (!kvmeld::declared(n.policy).evicts() && (i != p.full.index || is_shown)) {
      contender chosen = p.full;
      chosen.index = i, chosen.storage = n.storage;
      whole.entries.push_back(
          {.chosen = chosen,
           .name = n.name,
           .refusal = detail::refusal_of(n.policy, n.storage, o.prompt, shape.dim)});
    }
  }
  if (!whole.entries.empty()) {
    p.groups.push_back(std::move(whole));
  }

  p.behind = std::max(decoded_tokens, o.future_tokens());
  const index_t wanted = o.prompt + p.behind, positions = shape.max_positions;  // 0: not said
  detail::require(
      positions == 0 || o.prompt <= positions,
      fmt::format("--prompt: expected at most {} tokens, which the model was made for, got {}",
                  positions, o.prompt));
  detail::require(
      text_tokens >= wanted,
      fmt::format("--text: expected at least {} tokens (a prompt and {} after it), got {}", wanted,
                  p.behind, text_tokens));
  const index_t longest = positions > 0 ? std::min(text_tokens, positions) : text_tokens;
  std::set<index_t> too_long;  // slots whose streams neither text nor model is long enough for
  for (const budget_option& b : o.budgets) {
    group& g = p.groups.emplace_back(group{.title = title_of(b, o.prompt)});
    for (std::size_t i = 0; i < p.policies.size(); ++i) {
      const named_policy& n = p.policies[i];
      if (kvmeld::declared(n.policy).evicts()) {
        const any_policy policy = n.measuring();
        const index_t slots = b.of == budget_option::unit::bytes
                                  ? slots_within(policy, n.storage, b.given, o.prompt, o.room,
                                                 shape.dim, shape.group())
                                  : b.slots(o.prompt);
        p.most_slots = std::max(p.most_slots, slots);
        contender chosen{.index = i,
                         .policy = policy,
                         .limit = {slots},
                         .budgets = n.budgets,
                         .room = o.room,
                         .storage = n.storage};
        std::string refusal = "refused: --tasks needle finds its heads";
        if (chosen.budgets != budget_allocation::duo_attention || o.tasks.needle) {
          auto [held, why] = detail::holding(n, slots, o.room, shape.dim);
          chosen.policy = slots < o.prompt ? held : policy, refusal = std::move(why);
        }
        const index_t stream_tokens =
            o.tasks.stream && chosen.streams() ? stream_budgets * slots : 0;
        const bool streams = stream_tokens <= longest;
        if (!streams && too_long.insert(slots).second) {
          p.notes.push_back(fmt::format(
              "no stream at {} slots: it would take {} tokens, {} {}", slots, stream_tokens,
              longest < text_tokens ? "the model was made for" : "the text has", longest));
        }
        p.longest_stream = std::max(p.longest_stream, streams ? stream_tokens : 0);
        g.entries.push_back({.chosen = chosen,
                             .name = n.name,
                             .given = b.text(),
                             .stream_tokens = streams ? stream_tokens : 0,
                             .refusal = std::move(refusal)});
      }
    }
  }
  for (named_policy& n : p.policies) {
    set_table(n.policy, p.most_slots);
  }
  for (entry* const e : entries_of(p)) {
    set_table(e->chosen.policy, p.most_slots);
  }
  p.prompts = o.future_tokens() > 0 || o.tasks.nll ? o.prompts : 1;
  p.streams = p.longest_stream > 0 ? o.prompts : 0;
  if (positions > 0 && wanted > positions) {
    p.notes.push_back(
        fmt::format("the model was made for {} positions; {} are used", positions, wanted));
  }
  return p;
}

}  // namespace evaluate
