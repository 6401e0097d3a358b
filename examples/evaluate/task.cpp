// SPDX-License-Identifier: MIT
#include "evaluate/task.hpp"

#include <algorithm>  // std::max
#include <utility>

#include "evaluate/chain_text.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/questions.hpp"

namespace evaluate {

namespace {

/// The mean over all samples for each contender.
std::vector<score> mean_scores(const task& t, const options& o,
                               std::span<const named_policy> policies,
                               std::span<const contender> contenders, const workers& on) {
  const auto all = on.map(o.samples, [&](index_t i) { return t.run(i, policies, contenders); });
  std::vector<score> means = all.front();
  for (std::size_t c = 0; c < means.size(); ++c) {
    const auto mean = [&](auto part) {
      double sum = 0;
      for (const auto& sample : all) {
        sum += part(sample[c]);
      }
      return sum / o.samples;
    };
    means[c].after = mean([](const score& s) { return s.after; });
    for (const auto figure : {&score::inside, &score::nats, &score::kl}) {
      if (means[c].*figure) {
        means[c].*figure = mean([&](const score& s) { return *(s.*figure); });
      }
    }
  }
  return means;
}

bool takes_part(const task& t, const entry& e) {
  return e.refusal.empty() && (!t.from_empty || e.chosen.streams());
}

/// Its samples, or none when one does not fit.
std::vector<ruler_text> draw_samples(const options& o, const engine::tokenizer& tokens,
                                     std::span<const int> text, std::size_t which) {
  std::vector<ruler_text> samples;
  for (index_t i = 0; i < o.samples; ++i) {
    auto drawn = draw_ruler(o, tokens, text, which, i);
    if (!drawn) {
      return {};
    }
    samples.push_back(std::move(*drawn));
  }
  return samples;
}

}  // namespace

std::vector<task> make_tasks(const options& o, const plan& todo, const engine::decoder& model,
                             const engine::tokenizer& tokens, std::span<const int> text,
                             std::vector<std::string>& notes) {
  std::vector<task> tasks;
  const index_t slots = std::max(o.prompt, todo.most_slots);
  if (o.tasks.chain) {
    tasks.push_back({"chain", task_measure::nats, weight::prompt, weight::chain, false,
                     [&model, &o, slots, letters = letters_of(tokens)](
                         index_t i, const auto& policies, const auto& contenders) {
                       const chain_text drawn = draw_chain_text(o.seed, o.prompt, letters, i);
                       auto scores = nats_behind(model, drawn.body, drawn.next, policies,
                                                 contenders, slots + chain_tokens + 1);
                       for (score& s : scores) {  // above the best predictor, which sees all
                         s.after -= drawn.best;
                       }
                       return scores;
                     }});
  }
  if (o.tasks.copy) {
    tasks.push_back({"copy", task_measure::nats, weight::prompt, weight::chain, false,
                     [&model, &o, text, slots, begin = tokens.begin()](
                         index_t i, const auto& policies, const auto& contenders) {
                       return copy(model, draw_text(text, begin, o.seed, 5, i, o.prompt), policies,
                                   contenders, slots + copied_tokens + 1);
                     }});
  }
  for (std::size_t which = 0; o.tasks.ruler && which < ruler_tasks.size(); ++which) {
    const std::string name(ruler_tasks[which].name);
    auto samples = draw_samples(o, tokens, text, which);
    if (samples.empty()) {
      notes.push_back(
          fmt::format("{} is left out: it would take more than two thirds of a prompt of {} tokens",
                      name, o.prompt));
      continue;
    }
    tasks.push_back({name, task_measure::points, weight::needle_case, weight::needle, false,
                     [&model, &tokens, slots, samples = std::move(samples)](
                         index_t i, const auto& policies, const auto& contenders) {
                       return ruler(model, tokens, samples[as_size(i)], policies, contenders,
                                    slots);
                     }});
  }
  if (o.tasks.stream_needle) {
    options one = o;
    one.needles = 1;
    std::vector<needle_text> samples;
    for (index_t i = 0; i < o.samples; ++i) {  // the fact is in the first tenth
      samples.push_back(draw_needle(one, tokens, text, i, 0));
    }
    tasks.push_back({"stream_needle", task_measure::points, 0, weight::stream_needle, true,
                     [&model, &tokens, samples = std::move(samples)](index_t i, const auto&,
                                                                     const auto& contenders) {
                       return stream_needle(model, tokens, samples[as_size(i)], contenders);
                     }});
  }
  return tasks;
}

std::optional<task_outcome> run_task(const task& t, const options& o, const plan& todo,
                                     const workers& on, progress& bar,
                                     std::vector<std::string>& notes) {
  const double weight = weight::of_task(o, todo, t);
  contender full = todo.full;
  full.index = 0;
  task_outcome result{.name = t.name, .measure = t.measure, .samples = o.samples, .full = {}};
  const auto too_few = [&] {
    const double inside = result.full.inside.value_or(result.full.after);
    const bool few = t.measure == task_measure::points && std::min(result.full.after, inside) < 0.5;
    if (few) {
      notes.push_back(
          fmt::format("{} is left out: the full cache answers {:.0f} % after and {:.0f} "
                      "% inside the prompt (expected: 50 %)",
                      t.name, 100 * result.full.after, 100 * inside));
    }
    return few;
  };
  std::vector<contender> contenders;
  if (t.from_empty) {
    contenders.push_back(full);  // decoded side by side with the others
    bar.stage(t.name, weight);
  } else {
    const double first = o.samples * (t.reading + t.scoring);
    bar.stage(t.name + ": full cache", first);
    result.full =
        mean_scores(t, o, std::span(&todo.policies[todo.full.index], 1), std::span(&full, 1), on)
            .front();
    bar.stage(t.name, weight - first);
    if (too_few()) {
      return {};
    }
  }
  for (const entry* const e : entries_of(todo)) {
    if (takes_part(t, *e)) {
      contenders.push_back(e->chosen);
    }
  }
  const auto scores = mean_scores(t, o, todo.policies, contenders, on);
  auto next = scores.begin();
  if (t.from_empty) {
    result.full = *next++;
    if (too_few()) {
      return {};
    }
  }
  for (const entry* const e : entries_of(todo)) {
    result.entries.push_back(takes_part(t, *e) ? std::optional(*next++) : std::nullopt);
  }
  return result;
}

}  // namespace evaluate
