/// What becomes of every token, step by step: followed through the plans.
#pragma once

#include <vector>

#include "evaluate/material.hpp"

namespace evaluate {

enum class fate : char { to_come, kept, merged, gone };

/// `[steps][tokens]`: token `t` after step `s`, of KV head `head` of one recorded layer decoded
/// from an empty cache at `b`. A step in its parts, as `kvfold::step` puts them together.
inline std::vector<std::vector<fate>> follow(const any_policy& p, const engine::config& shape,
                                             const engine::layer_record& layer, index_t head_index,
                                             index_t steps, const budget& b) {
  const index_t width = shape.group() * shape.dim;
  kvfold::cache<float> kv{
      {.heads = 1, .group = shape.group(), .dim = shape.dim, .capacity = b.target + 1}};
  auto state = kvfold::make_state(p, kv);
  const auto head = kv.head(0);
  kvfold::workspace& work = state.workspace();
  std::vector<float> out(static_cast<std::size_t>(width));
  std::vector<std::vector<index_t>> members;  // tokens of each slot
  std::vector<std::vector<fate>> fates;
  for (index_t t = 0; t < steps; ++t) {
    head.push(&layer.k(t, head_index * shape.dim), &layer.v(t, head_index * shape.dim));
    members.push_back({t});
    const auto probabilities =
        std::span(work.attention).first(members.size() * static_cast<std::size_t>(head.group()));
    kvfold::attend(head, &layer.q(t, head_index * width), out.data(), probabilities);
    kvfold::observe(p, head, state[0], work, std::span<const float>(probabilities));
    if (head.length() > b.target) {
      kvfold::plan(p, head, state[0], b.target, work.plan);
      std::vector<std::vector<index_t>> rows(static_cast<std::size_t>(work.plan.rows()));
      for (index_t r = 0; r < work.plan.rows(); ++r) {
        auto& slot = rows[static_cast<std::size_t>(r)];
        for (const kvfold::edge& e : work.plan.row(r)) {
          const auto& from = members[static_cast<std::size_t>(e.source)];
          slot.insert(slot.end(), from.begin(), from.end());
        }
      }
      members = std::move(rows);
      kvfold::apply(work.plan, head, state[0]);
    }
    kvfold::traits::settle(p, head, state[0], b.target);

    auto& now = fates.emplace_back(static_cast<std::size_t>(steps), fate::to_come);
    std::fill_n(now.begin(), t + 1, fate::gone);
    for (const auto& slot : members) {
      for (const index_t token : slot) {
        now[static_cast<std::size_t>(token)] = slot.size() == 1 ? fate::kept : fate::merged;
      }
    }
  }
  return fates;
}

}  // namespace evaluate
