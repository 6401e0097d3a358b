// SPDX-License-Identifier: MIT
/// The second file and the second table: a column for each task.
#pragma once

#include <fmt/format.h>

#include <algorithm>  // std::max
#include <cmath>      // std::round
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "evaluate/row.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// "results/e.csv" has "results/e-tasks.csv" beside it.
inline std::filesystem::path tasks_file(const std::filesystem::path& csv) {
  return csv.parent_path() / (csv.stem().string() + "-tasks" + csv.extension().string());
}

inline void write_tasks_header(std::ostream& out) {
  out << "policy,budget,slots,task,samples,full_after,after,full_inside,inside" << std::endl;
}

/// A row for each policy and budget, flushed.
inline void write_tasks_csv(std::ostream& out, const plan& todo, const task_outcome& t) {
  const auto field = [](const std::optional<double>& x) {
    return x ? fmt::format("{:.6g}", *x) : std::string();
  };
  auto result = t.entries.begin();
  for (const group& g : todo.groups) {
    for (const entry& e : g.entries) {
      if (const auto& s = *result++) {
        out << fmt::format("{},{},{},{},{},{},{},{},{}\n", csv_field(e.name), e.given,
                           e.chosen.limit.slots, t.name, t.samples, field(t.full.after),
                           field(s->after), field(t.full.inside), field(s->inside));
      }
    }
  }
  out << std::flush;
}

namespace detail {

/// What a cell shows, in the unit of the table: points lost, or nats in thousandths.
struct task_cell {
  std::optional<double> after = {}, inside = {};
};

inline task_cell cell_of(const task_outcome& t, const std::optional<score>& s) {
  if (!s) {
    return {};
  }
  if (t.measure == task_measure::nats) {
    return {std::round(1000 * s->after), {}};
  }
  // Zero added: not "-0".
  const auto lost = [](double full, double x) { return std::round(100 * (full - x)) + 0.0; };
  return {lost(t.full.after, s->after),
          s->inside ? std::optional(lost(*t.full.inside, *s->inside)) : std::nullopt};
}

/// "  5*/ 10 ", or nats; the best of `group` are marked, unless all are equal.
inline std::string shown(const task_cell& x, const std::vector<task_cell>& group,
                         task_measure measure) {
  const auto mark = [&](std::optional<double> task_cell::*figure) {
    bool best = true, worse_exists = false;
    for (const task_cell& other : group) {
      if (const auto& y = other.*figure) {
        best &= *y >= *(x.*figure);
        worse_exists |= *y > *(x.*figure);
      }
    }
    return best && worse_exists ? '*' : ' ';
  };
  if (!x.after) {
    return "-";
  }
  if (measure == task_measure::nats) {
    return fmt::format("{:.3f}{}", *x.after / 1000, mark(&task_cell::after));
  }
  return !x.inside ? fmt::format("{:.0f}{}", *x.after, mark(&task_cell::after))
                   : fmt::format("{:.0f}{}/{:>3.0f}{}", *x.after, mark(&task_cell::after),
                                 *x.inside, mark(&task_cell::inside));
}

inline std::string full_line(const task_outcome& t) {
  return t.measure == task_measure::nats ? fmt::format("{:.3f} ", t.full.after)
         : !t.full.inside
             ? fmt::format("{:.0f} ", 100 * t.full.after)
             : fmt::format("{:.0f} /{:>3.0f} ", 100 * t.full.after, 100 * *t.full.inside);
}

}  // namespace detail

/// Empty when no task was done.
inline std::string tasks_table(const plan& todo, const std::vector<task_outcome>& tasks) {
  if (tasks.empty()) {
    return {};
  }
  std::size_t name_width = std::string_view("full cache: right, %").size();
  for (const named_policy& p : todo.policies) {
    name_width = std::max(name_width, p.name.size());
  }
  const auto line = [&](const std::string& name, const std::string& slots, const auto& cell) {
    std::string text = fmt::format("{:<{}}  {:>6}", name, name_width, slots);
    for (const task_outcome& t : tasks) {
      text += fmt::format("  {:>{}}", cell(t), std::max<std::size_t>(t.name.size() + 1, 10));
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + '\n';
  };
  std::string text = fmt::format(
      "\nPoints lost against the full cache on the same {} samples a task: the "
      "question after compression / inside the prompt\n\n",
      tasks.front().samples);
  text += line("policy", "slots", [](const task_outcome& t) { return t.name + ' '; });
  text += line("", "", [](const task_outcome& t) {
    return t.measure == task_measure::nats ? "nats/token " : "points ";
  });
  text += line("full cache: right, %", "", detail::full_line);
  std::size_t first = 0;  // of the group's entries
  for (const group& g : todo.groups) {
    text += "\n" + g.title + "\n";
    for (std::size_t i = 0; i < g.entries.size(); ++i) {
      const entry& e = g.entries[i];
      text += line(e.name, fmt::format("{}", e.chosen.limit.slots), [&](const task_outcome& t) {
        std::vector<detail::task_cell> group;
        for (std::size_t j = 0; j < g.entries.size(); ++j) {
          group.push_back(detail::cell_of(t, t.entries[first + j]));
        }
        return detail::shown(group[i], group, t.measure);
      });
    }
    first += g.entries.size();
  }
  return text;
}

}  // namespace evaluate
