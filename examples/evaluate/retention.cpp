// SPDX-License-Identifier: MIT
#include "evaluate/retention.hpp"

namespace evaluate {

std::vector<std::vector<fate>> follow(const any_policy& p, const engine::config& shape,
                                      const engine::layer_record& layer, index_t head_index,
                                      index_t steps, const budget& b) {
  const index_t width = shape.group() * shape.dim;
  kvmeld::cache kv(shape.attention(1), {.capacity = b.trigger_length()});
  const auto head = kv.head(0);
  auto state = kvmeld::make_head_state(p, head);
  kvmeld::workspace work;
  work.reserve(head);
  std::vector<float> out(static_cast<std::size_t>(width));
  std::vector<std::vector<index_t>> members;  // tokens of each slot
  std::vector<std::vector<fate>> fates;
  for (index_t t = 0; t < steps; ++t) {
    head.push(&layer.k(t, head_index * shape.dim), &layer.v(t, head_index * shape.dim));
    members.push_back({t});
    const auto probabilities =
        std::span(work.attention).first(members.size() * static_cast<std::size_t>(head.group()));
    const float* const q = &layer.q(t, head_index * width);
    const auto log_sum_exp =
        std::span(work.log_sum_exp).first(static_cast<std::size_t>(head.group()));
    kvmeld::hooks(p).attend(head, state, q, out.data(), probabilities, log_sum_exp);
    kvmeld::observe(p, head, state, work,
                    {.probabilities = probabilities, .log_sum_exp = log_sum_exp, .query = q});
    if (b.reached(head.length())) {
      kvmeld::plan(p, head, state, b.slots, work.scratch, work.plan);
      std::vector<std::vector<index_t>> rows(static_cast<std::size_t>(work.plan.rows()));
      for (index_t r = 0; r < work.plan.rows(); ++r) {
        auto& slot = rows[static_cast<std::size_t>(r)];
        for (const kvmeld::merge_source& e : work.plan.row(r)) {
          const auto& from = members[static_cast<std::size_t>(e.source)];
          slot.insert(slot.end(), from.begin(), from.end());
        }
      }
      members = std::move(rows);
      kvmeld::apply(p, work.plan, head, state, work.scratch);
    }
    if (head.length() <= b.slots) {
      kvmeld::hooks(p).after_compress(head, state, b.slots);
    }

    auto& now = fates.emplace_back(static_cast<std::size_t>(steps), fate::to_come);
    std::fill_n(now.begin(), t + 1, fate::evicted);
    for (const auto& slot : members) {
      for (const index_t token : slot) {
        now[static_cast<std::size_t>(token)] = slot.size() == 1 ? fate::kept : fate::merged;
      }
    }
  }
  return fates;
}

}  // namespace evaluate
