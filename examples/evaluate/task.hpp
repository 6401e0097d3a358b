// SPDX-License-Identifier: MIT
/// Tasks of the second table: their samples are read one by one, so that only a few are in memory.
#pragma once

#include <algorithm>  // std::ranges::count
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/tokenizer.hpp"
#include "evaluate/parallel.hpp"
#include "evaluate/plan.hpp"

namespace evaluate {

/// Of one sample, or their mean: share answered right, or nats.
struct score {
  double after = 0;                   ///< the question after compression
  std::optional<double> inside = {};  ///< the question inside the prompt
  /// Nats a token of the true answer, and of the text before it KL from the full cache's.
  std::optional<double> nats = {}, kl = {};
};

enum class task_measure {
  points,  ///< share answered right
  nats     ///< a token, above the best predictor; there is no question
};

struct task {
  std::string name;
  task_measure measure = task_measure::points;
  double reading = 0, scoring = 0;  ///< about so many ms a sample; a sample and a contender
  bool from_empty = false;          ///< all is decoded: for those that can
  /// Sample `i`, read by `policies`: a score for each contender.
  std::function<std::vector<score>(index_t i, std::span<const named_policy> policies,
                                   std::span<const contender> contenders)>
      run;
};

/// What came of it.
struct task_outcome {
  std::string name;
  task_measure measure = task_measure::points;
  index_t samples = 0;
  score full;                                      ///< of the full cache
  std::vector<std::optional<score>> entries = {};  ///< the plan's, group by group; refused: none
};

/// About how long things take, in milliseconds of one thread with the bundled model, so that the
/// bar runs evenly.
namespace weight {

inline constexpr double prompt = 270, needle_case = 340, stream_token = 0.3;
inline constexpr double error = 5, nll = 280, needle = 40, chain = 140, stream_needle = 700,
                        stream_step = 0.2, speed = 800;

inline double of_reading(const options& o, const plan& p) {
  return prompt * p.prompts + (o.tasks.needle ? needle_case * o.cases : 0) +
         stream_token * p.streams * p.longest_stream + (o.tasks.speed ? prompt * o.threads : 0);
}

/// Of a budget's rows, side by side.
inline double of_nll(const plan& p, const group& g) {
  return nll * p.prompts *
         static_cast<double>(std::ranges::count(g.entries, std::string(), &entry::refusal));
}

inline double of_row(const options& o, const plan& p, const entry& e) {
  return (o.tasks.error ? error * p.prompts : 0) + (o.tasks.needle ? needle * o.cases : 0) +
         stream_step * p.streams * e.stream_tokens + (o.tasks.speed ? speed * o.threads : 0);
}

inline double of_all(const options& o, const plan& p) {
  double sum = of_reading(o, p);
  for (const entry* const e : entries_of(p)) {
    sum += e->refusal.empty() ? of_row(o, p, *e) : 0;
  }
  for (const group& g : p.groups) {
    sum += o.tasks.nll ? of_nll(p, g) : 0;
  }
  return sum;
}

/// Its samples are read for the full cache first, then for all.
inline double of_task(const options& o, const plan& p, const task& t) {
  double sum = 2 * t.reading + t.scoring;
  for (const entry* const e : entries_of(p)) {
    sum += e->refusal.empty() ? t.scoring : 0;
  }
  return o.samples * sum;
}

}  // namespace weight

/// Those that were asked for, their samples drawn; a note for each that does
/// not fit into the prompt. They refer to all that is given. Throws `usage_error`.
std::vector<task> make_tasks(const options& o, const plan& todo, const engine::decoder& model,
                             const engine::tokenizer& tokens, std::span<const int> text,
                             std::vector<std::string>& notes);

/// None, and a note, when the full cache answers less than half.
std::optional<task_outcome> run_task(const task& t, const options& o, const plan& todo,
                                     const workers& on, progress& bar,
                                     std::vector<std::string>& notes);

}  // namespace evaluate
