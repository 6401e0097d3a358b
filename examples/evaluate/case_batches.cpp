// SPDX-License-Identifier: MIT
#include "evaluate/case_batches.hpp"

#include <algorithm>  // std::clamp
#include <utility>    // std::move

#include "evaluate/weights.hpp"

namespace evaluate {

index_t cases_at_once(const options& o, const plan& todo, const engine::config& shape) {
  double queries = own_queries;
  for (const named_policy& p : todo.policies) {
    if (p.policy.uses_queries() && p.queries != query_source::own) {
      queries += p.queries_taken > 0 ? p.queries_taken : 256;
    }
  }
  const double slots = std::max(o.prompt, todo.most_slots);
  const double bytes = sizeof(float) * double{1} * shape.layers * shape.dim *
                       (4 * shape.kv_heads * slots + 2 * shape.heads * queries);
  const auto fit =
      static_cast<index_t>(std::clamp(o.memory * (1 << 30) / bytes, 1.0, double{1} * o.cases));
  return fit < o.cases && fit > cases_abreast ? fit - fit % cases_abreast : fit;
}

std::vector<needle_recall> read_cases(dataset& m, const options& o, plan& todo,
                                      const engine::decoder& model, const engine::tokenizer& tokens,
                                      std::span<const needle_text> needles, const workers& on,
                                      progress& bar) {
  const index_t slots = std::max(o.prompt, todo.most_slots);
  const auto at_once = static_cast<std::size_t>(cases_at_once(o, todo, model.shape()));
  std::vector<needle_recall> asked;
  for (const group& g : todo.groups) {
    asked.resize(asked.size() + g.entries.size());
  }
  const auto ask_all = [&] {
    auto recall = asked.begin();
    for (const group& g : todo.groups) {
      for (const entry& e : g.entries) {
        if (e.refusal.empty()) {
          bar.stage(fmt::format("{}, {} slots: needle", e.name, e.chosen.limit.slots),
                    weight::needle * static_cast<double>(m.cases.size()));
          recall->after += needle(e.chosen, model, tokens, m.cases, false, on);
          recall->inside += needle(e.chosen, model, tokens, m.cases, true, on);
        }
        ++recall;
      }
    }
  };
  for (std::size_t begin = 0; begin < needles.size(); begin += at_once) {
    const auto batch = needles.subspan(begin, std::min(at_once, needles.size() - begin));
    bar.stage("reading needle prompts", weight::needle_case * static_cast<double>(batch.size()));
    m.cases.clear();  // before the next ones are read
    m.cases = on.map(static_cast<index_t>(batch.size()), [&](index_t i) {
      const needle_text& drawn = batch[static_cast<std::size_t>(i)];
      const auto more = static_cast<index_t>(drawn.question.size()) + o.digits + 3;
      return read_needle(model, todo.policies, tokens, drawn, slots + more);
    });
    for (needle_case& c : m.cases) {
      m.looking.push_back(std::move(c.stats));
    }
    if (begin == 0) {
      const auto heads = by_retrieval(mean_head_stats(m.looking), model.shape().group());
      todo.set_whole_heads(heads, o.prompt);
    }
    if (begin + at_once < needles.size()) {
      ask_all();
    }
  }
  return asked;
}

}  // namespace evaluate
