// SPDX-License-Identifier: MIT
/// The tables for people, aligned, a group for each budget, the best of a group marked: of the
/// rows, and of the tasks of the second table, which have a file of their own.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::round
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "evaluate/row.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// A row of the table: results, or why there are none.
struct table_line {
  row result;
  std::string refusal = {};
};

/// Columns of a table for people: the first has names of policies, the second slots.
struct aligned {
  std::size_t name_width;
  std::vector<std::size_t> widths;

  aligned(std::size_t least, const std::vector<named_policy>& policies) : name_width(least) {
    for (const named_policy& p : policies) {
      name_width = std::max(name_width, p.name.size());
    }
  }

  std::string line(std::string_view name, std::string_view slots,
                   const std::vector<std::string>& cells) const {
    std::string text = fmt::format("{:<{}}  {:>6}", name, name_width, slots);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      text += fmt::format("  {:>{}}", cells[i], widths[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + '\n';
  }
};

/// '*': none of the others, where there is any, is less than `x`, and some are more.
inline char mark_least(double x, const std::vector<std::optional<double>>& others) {
  const auto less = [&](const auto& y) { return y && *y < x; };
  const auto more = [&](const auto& y) { return y && *y > x; };
  return std::ranges::none_of(others, less) && std::ranges::any_of(others, more) ? '*' : ' ';
}

class table {
 public:
  /// With the columns of the tasks that were asked for, and `bytes`.
  table(const task_set& tasks, const std::vector<named_policy>& policies) : aligned_(6, policies) {
    for (const column& c : columns) {
      if (!c.later && (c.task == nullptr || tasks.*c.task)) {
        columns_.push_back(c);
        aligned_.widths.push_back(
            1 + std::max({c.what.size(), c.unit.size(), as_size(c.has_error ? c.digits + 8 : 6)}));
      }
    }
  }

  std::string heading() const {
    std::vector<std::string> what, unit;
    for (const column& c : columns_) {
      what.push_back(std::string(c.what) + ' ');
      unit.push_back(std::string(c.unit) + ' ');
    }
    return aligned_.line("policy", "slots", what) + aligned_.line("", "", unit);
  }

  std::string group(const std::string& title, const std::vector<table_line>& lines) const {
    std::string text = "\n" + title + "\n";
    for (const auto& [r, refusal] : lines) {
      std::vector<std::string> cells;
      for (const column& c : columns_) {
        cells.push_back(cell(c, r) + mark(c, r, lines));
      }
      const auto slots = fmt::format("{}", r.slots);
      text += refusal.empty()
                  ? aligned_.line(r.policy, slots, cells)
                  : aligned_.line(r.policy, fmt::format("{:>6}  {}", slots, refusal), {});
    }
    return text;
  }

 private:
  /// In the unit of the table.
  static double shown(const column& c, double x) {
    return c.value == &row::bytes                       ? x / 1024
           : c.unit.find('%') != std::string_view::npos ? 100 * x
                                                        : x;
  }

  /// With its standard error, if there is one, in the last digit shown: "0.122 ±4".
  static std::string cell(const column& c, const row& r) {
    const auto& x = r.*c.value;
    if (!x) {
      return "-";
    }
    if (c.value == &row::bytes) {
      return x->mean < 1 << 20 ? fmt::format("{:.0f} KiB", x->mean / 1024)
                               : fmt::format("{:.1f} MiB", x->mean / (1 << 20));
    }
    return fmt::format("{:.{}f}", shown(c, x->mean), c.digits) +
           (x->error ? fmt::format(" ±{:.0f}", shown(c, *x->error) * std::pow(10, c.digits)) : "");
  }

  /// Equal to what is shown are equally good.
  static char mark(const column& c, const row& r, const std::vector<table_line>& group) {
    const auto rank = [&](const row& of) {
      return (c.high ? -1 : 1) * std::round(shown(c, (of.*c.value)->mean) * std::pow(10, c.digits));
    };
    std::vector<std::optional<double>> ranks;
    for (const auto& [other, refusal] : group) {
      if (refusal.empty() && other.*c.value) {
        ranks.push_back(rank(other));
      }
    }
    return r.*c.value ? mark_least(rank(r), ranks) : ' ';
  }

  aligned aligned_;
  std::vector<column> columns_;
};

/// "results/e.csv" has "results/e-tasks.csv" beside it.
inline std::filesystem::path tasks_file(const std::filesystem::path& csv) {
  return csv.parent_path() / (csv.stem().string() + "-tasks" + csv.extension().string());
}

inline void write_tasks_header(std::ostream& out) {
  out << "policy,budget,slots,task,samples,full_after,after,full_inside,inside,"
         "full_nats,nats,kl"
      << std::endl;
}

inline void write_asked_header(std::ostream& out) {
  out << "policy,budget,slots,file,metric,prompts,score,score_se" << std::endl;
}

/// A row for each policy and budget, flushed.
inline void write_tasks_csv(std::ostream& out, const plan& todo, const task_outcome& t) {
  const auto field = [](const std::optional<double>& x) {
    return x ? fmt::format("{:.6g}", *x) : std::string();
  };
  auto result = t.entries.begin();
  for (const entry* const e : entries_of(todo)) {
    if (const auto& s = *result++) {
      out << fmt::format("{},{},{},{},{},{},{},{},{},{},{},{}\n", csv_field(e->name), e->given,
                         e->chosen.limit.slots, t.name, t.samples, field(t.full.after),
                         field(s->after), field(t.full.inside), field(s->inside),
                         field(t.full.nats), field(s->nats), field(s->kl));
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
  if (!x.after) {
    return "-";
  }
  const auto mark = [&](std::optional<double> task_cell::*figure) {
    std::vector<std::optional<double>> others;
    for (const task_cell& other : group) {
      others.push_back(other.*figure);
    }
    return mark_least(*(x.*figure), others);
  };
  if (measure == task_measure::nats) {
    return fmt::format("{:.3f}{}", *x.after / 1000, mark(&task_cell::after));
  }
  return fmt::format("{:.0f}{}", *x.after, mark(&task_cell::after)) +
         (x.inside ? fmt::format("/{:>3.0f}{}", *x.inside, mark(&task_cell::inside)) : "");
}

inline std::string full_cell(const task_outcome& t) {
  return t.measure == task_measure::nats
             ? fmt::format("{:.3f} ", t.full.after)
             : fmt::format("{:.0f} ", 100 * t.full.after) +
                   (t.full.inside ? fmt::format("/{:>3.0f} ", 100 * *t.full.inside) : "");
}

}  // namespace detail

/// Empty when no task was done.
inline std::string tasks_table(const plan& todo, const std::vector<task_outcome>& tasks) {
  if (tasks.empty()) {
    return {};
  }
  constexpr std::string_view full = "full cache: right, %";
  aligned layout(full.size(), todo.policies);
  std::vector<std::string> names, units, of_full;
  for (const task_outcome& t : tasks) {
    layout.widths.push_back(std::max<std::size_t>(t.name.size() + 1, 10));
    names.push_back(t.name + ' ');
    units.push_back(t.measure == task_measure::nats ? "nats/token " : "points ");
    of_full.push_back(detail::full_cell(t));
  }
  std::string text = fmt::format(
                         "\nPoints lost against the full cache on the same {} samples a task: the "
                         "question after compression / inside the prompt\n\n",
                         tasks.front().samples) +
                     layout.line("policy", "slots", names) + layout.line("", "", units) +
                     layout.line(full, "", of_full);
  std::size_t first = 0;  // of the group's entries
  for (const group& g : todo.groups) {
    text += "\n" + g.title + "\n";
    std::vector<std::vector<std::string>> lines(g.entries.size());
    for (const task_outcome& t : tasks) {
      std::vector<detail::task_cell> cells;
      for (std::size_t i = 0; i < lines.size(); ++i) {
        cells.push_back(detail::cell_of(t, t.entries[first + i]));
      }
      for (std::size_t i = 0; i < lines.size(); ++i) {
        lines[i].push_back(detail::shown(cells[i], cells, t.measure));
      }
    }
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const entry& e = g.entries[i];
      text += layout.line(e.name, fmt::format("{}", e.chosen.limit.slots), lines[i]);
    }
    first += g.entries.size();
  }
  return text;
}

}  // namespace evaluate
