// SPDX-License-Identifier: MIT
/// About how long things take, in milliseconds of one thread with the bundled model, so that the
/// bar runs evenly.
#pragma once

#include "evaluate/plan.hpp"
#include "evaluate/task.hpp"

namespace evaluate::weight {

inline constexpr double prompt = 270, needle_case = 340, stream_token = 0.3;
inline constexpr double error = 5, nll = 280, needle = 40, chain = 140, stream_needle = 700,
                        stream_step = 0.2, speed = 800;

inline double of_reading(const options& o, const plan& p) {
  return prompt * p.prompts + (o.tasks.needle ? needle_case * o.cases : 0) +
         stream_token * p.streams * p.longest_stream + (o.tasks.speed ? prompt * o.threads : 0);
}

inline double of_row(const options& o, const plan& p, const entry& e) {
  return (o.tasks.error ? error * p.prompts : 0) + (o.tasks.nll ? nll * p.prompts : 0) +
         (o.tasks.needle ? needle * o.cases : 0) + stream_step * p.streams * e.stream_tokens +
         (o.tasks.speed ? speed * o.threads : 0);
}

inline double of_all(const options& o, const plan& p) {
  double sum = of_reading(o, p);
  for (const group& g : p.groups) {
    for (const entry& e : g.entries) {
      sum += e.refusal.empty() ? of_row(o, p, e) : 0;
    }
  }
  return sum;
}

/// Its samples are read for the full cache first, then for all.
inline double of_task(const options& o, const plan& p, const task& t) {
  double sum = 2 * t.reading + t.scoring;
  for (const group& g : p.groups) {
    for (const entry& e : g.entries) {
      sum += e.refusal.empty() ? t.scoring : 0;
    }
  }
  return o.samples * sum;
}

}  // namespace evaluate::weight
