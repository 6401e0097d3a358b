// SPDX-License-Identifier: MIT
/// One row's measurements.
#pragma once

#include "evaluate/attention_error.hpp"
#include "evaluate/needle.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/row.hpp"
#include "evaluate/speed.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// A row, and what the pictures show beyond it.
struct outcome {
  row result;
  recall needle_after = {};               ///< by depth
  std::vector<double> stream_error = {};  ///< [stream_budgets − 1] a budget's steps each
};

/// All that was asked for of one policy at one budget. `predicted`: of the task `nll`, which
/// measures the rows of a budget side by side. `asked`: needle cases that are in memory no more.
inline outcome measure_row(const entry& e, const options& o, const plan& todo,
                           const engine::decoder& model, const engine::tokenizer& tokens,
                           const dataset& m, const mean_prediction& predicted, needle_recall asked,
                           const workers& on, progress& bar) {
  const contender& c = e.chosen;
  outcome x{{.policy = e.name, .budget = e.given, .slots = c.limit.slots}};
  row& r = x.result;
  const auto stage = [&](const char* task, double weight) {
    bar.stage(fmt::format("{}, {} slots: {}", e.name, c.limit.slots, task), weight);
  };
  r.bytes = {static_cast<double>(compressed_cache(c, m.prompts.front().read).bytes())};
  if (o.tasks.error) {
    stage("error", weight::error * todo.prompts);
    const errors found = errors_of(c, model, m.prompts, on);
    r.attention_error = found.attention;
    r.output_error = found.output;
  }
  if (o.tasks.nll) {
    r.nll = predicted.nll;
    r.kl = !c.is_reference()    ? predicted.kl  // the others' reference: 0 by definition
           : predicted.kl.error ? estimate{0, 0}
                                : estimate{0};
  }
  if (o.tasks.needle) {
    const double weight = weight::needle * static_cast<double>(m.cases.size()) / 2;
    stage("needle", weight);
    x.needle_after = asked.after += needle(c, model, tokens, m.cases, false, on);
    r.needle_after = x.needle_after.share();
    stage("needle inside", weight);
    asked.inside += needle(c, model, tokens, m.cases, true, on);
    r.needle_inside = asked.inside.share();
  }
  if (o.tasks.stream && c.is_reference()) {
    r.stream_error = {0};  // by definition: it is what the others are measured against
  } else if (e.stream_tokens > 0) {
    stage("stream", weight::stream_step * todo.streams * e.stream_tokens);
    x.stream_error = stream_error(c, model.shape(), m.streams, on);
    r.stream_error = {std::accumulate(x.stream_error.begin(), x.stream_error.end(), 0.0) /
                      static_cast<double>(x.stream_error.size())};
  }
  if (o.tasks.speed) {
    stage("speed", weight::speed * o.threads);
    const text_prompt& p = m.prompts.front();
    const speed s = decode_speed(c, todo.full, model, p);
    r.prefill_ms = {
        1000 * (m.prefill_seconds + compress_seconds(todo.policies[c.index], c, model.shape(), m))};
    r.decode_tokens_per_s = {s.decode_tokens_per_s};
    r.decode_vs_full = {c.is_reference() ? 1 : s.decode_vs_full};
  }
  return x;
}

}  // namespace evaluate
