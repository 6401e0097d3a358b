// SPDX-License-Identifier: MIT
/// Making the material: all that the full model has to do. Needle cases of which not all fit in
/// memory are read batch by batch: all but the last batch are asked before the rows are measured.
#pragma once

#include <algorithm>  // std::clamp, std::max
#include <span>
#include <utility>  // std::move
#include <vector>

#include "evaluate/dataset.hpp"
#include "evaluate/needle.hpp"
#include "evaluate/speed.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// Drawn before anything is run: they may not fit.
inline std::vector<needle_text> draw_needles(const options& o, const engine::tokenizer& tokens,
                                             std::span<const int> text) {
  std::vector<needle_text> needles;
  for (index_t i = 0; o.tasks.needle && i < o.cases; ++i) {
    // All depths count alike.
    needles.push_back(draw_needle(o, tokens, text, i, i % depth_bins));
  }
  return needles;
}

/// Reads prompts and streams, as far as the tasks need them.
inline void prepare(dataset& m, const options& o, const plan& todo, const engine::decoder& model,
                    std::span<const int> text, std::optional<int> begin, const workers& on,
                    progress& bar) {
  const index_t slots = std::max(o.prompt, todo.most_slots);
  bar.stage("reading prompts", weight::prompt * todo.prompts);
  m.prompts = on.map(todo.prompts, [&](index_t i) {
    const auto drawn = draw_text(text, begin, o.seed, 1, i, o.prompt + todo.behind);
    return read_prompt(model, todo.policies, drawn, o.prompt, o.future_tokens(),
                       slots + todo.behind + 1, o.tasks.nll, i == 0 ? &m.timed : nullptr);
  });
  bar.stage("reading streams", weight::stream_token * todo.streams * todo.longest_stream);
  m.streams = on.map(todo.streams, [&](index_t i) {
    return read_stream(model, draw_text(text, begin, o.seed, 3, i, todo.longest_stream));
  });
  if (o.tasks.speed) {
    bar.stage("reading a prompt alone", weight::prompt * o.threads);
    auto first = draw_text(text, begin, o.seed, 1, 0, o.prompt + todo.behind);
    first.resize(as_size(o.prompt));
    m.prefill_seconds = median_seconds([&] { engine::prefill(model, first); });
    m.again = replay_for(todo.policies, model, m.timed, first);
  }
}

/// As many as take `--memory`: keys and values, once more where a compressed cache decodes, and the
/// queries of both readings. A multiple of `cases_abreast` where that many fit, so that batches do
/// not change what is decoded side by side.
inline index_t cases_at_once(const options& o, const plan& todo, const engine::config& shape) {
  double queries = own_queries;
  for (const named_policy& p : todo.policies) {
    if (kvmeld::declared(p.policy).uses_queries() && p.queries != query_source::own) {
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

/// Reads the cases `needles`; the last batch stays in `m`. What was asked already of each of the
/// plan's entries, group by group. Heads that keep all are found in the first batch.
inline std::vector<needle_recall> read_cases(dataset& m, const options& o, plan& todo,
                                             const engine::decoder& model,
                                             const engine::tokenizer& tokens,
                                             std::span<const needle_text> needles,
                                             const workers& on, progress& bar) {
  const index_t slots = std::max(o.prompt, todo.most_slots);
  const auto at_once = as_size(cases_at_once(o, todo, model.shape()));
  const auto entries = entries_of(todo);
  std::vector<needle_recall> asked(entries.size());
  const auto ask_all = [&] {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (const entry& e = *entries[i]; e.refusal.empty()) {
        bar.stage(fmt::format("{}, {} slots: needle", e.name, e.chosen.limit.slots),
                  weight::needle * static_cast<double>(m.cases.size()));
        asked[i].after += needle(e.chosen, model, tokens, m.cases, false, on);
        asked[i].inside += needle(e.chosen, model, tokens, m.cases, true, on);
      }
    }
  };
  for (std::size_t begin = 0; begin < needles.size(); begin += at_once) {
    const auto batch = needles.subspan(begin, std::min(at_once, needles.size() - begin));
    bar.stage("reading needle prompts", weight::needle_case * static_cast<double>(batch.size()));
    m.cases.clear();  // before the next ones are read
    m.cases = on.map(count_of(batch), [&](index_t i) {
      const needle_text& drawn = batch[as_size(i)];
      const auto more = count_of(drawn.question) + o.digits + 3;
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
