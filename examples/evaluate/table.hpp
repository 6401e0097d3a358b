// SPDX-License-Identifier: MIT
/// The rows for people: aligned, a group for each budget, the best of a group marked.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::round
#include <string>
#include <vector>

#include "evaluate/options.hpp"
#include "evaluate/row.hpp"

namespace evaluate {

/// A row of the table: results, or why there are none.
struct table_line {
  row result;
  std::string refusal = {};
};

namespace detail {

/// In the unit of the table.
inline double shown(const column& c, double x) {
  return c.value == &row::bytes                             ? x / 1024
         : c.heading[1].find('%') != std::string_view::npos ? 100 * x
                                                            : x;
}

inline std::string cell(const column& c, double x) {
  if (c.value == &row::bytes) {
    return x < 1 << 20 ? fmt::format("{:.0f} KiB", x / 1024)
                       : fmt::format("{:.1f} MiB", x / (1 << 20));
  }
  return fmt::format("{:.{}f}", shown(c, x), c.digits);
}

/// ... and its standard error, if there is one, in the last digit shown: "0.122 ±4".
inline std::string cell(const column& c, const row& r) {
  const auto& x = r.*c.value;
  if (!x) {
    return "-";
  }
  const auto error = c.standard_error != nullptr ? r.*c.standard_error : std::nullopt;
  return cell(c, *x) +
         (error ? fmt::format(" ±{:.0f}", shown(c, *error) * std::pow(10, c.digits)) : "");
}

/// Equal to what is shown are equally good.
inline bool is_best(const column& c, double x, const std::vector<table_line>& group) {
  const double sign = c.best == best::lowest ? 1 : -1, unit = std::pow(10, c.digits);
  const auto rank = [&](double y) { return sign * std::round(shown(c, y) * unit); };
  bool worse_exists = false;
  for (const auto& [other, refusal] : group) {
    if (refusal.empty() && other.*c.value) {
      if (rank(*(other.*c.value)) < rank(x)) {
        return false;
      }
      worse_exists |= rank(*(other.*c.value)) > rank(x);
    }
  }
  return worse_exists && c.best != best::none;
}

}  // namespace detail

/// The columns of the tasks that were asked for, and `bytes`.
inline std::vector<column> columns_of(const task_set& tasks) {
  std::vector<column> shown;
  for (const column& c : columns) {
    const bool wanted = c.value == &row::attention_error              ? tasks.error
                        : c.value == &row::nll || c.value == &row::kl ? tasks.nll
                        : c.value == &row::needle_after || c.value == &row::needle_inside
                            ? tasks.needle
                        : c.value == &row::stream_error ? tasks.stream
                        : c.value == &row::bytes        ? true
                                                        : tasks.speed;
    if (wanted && !c.later) {
      shown.push_back(c);
    }
  }
  return shown;
}

class table {
 public:
  table(std::vector<column> shown, const std::vector<named_policy>& policies)
      : columns_(std::move(shown)) {
    for (const named_policy& p : policies) {
      name_width_ = std::max(name_width_, p.name.size());
    }
  }

  std::string heading() const {
    std::string lines;
    for (const std::size_t line : {0U, 1U}) {
      lines += fmt::format("{:<{}}  {:>6}", line == 0 ? "policy" : "", name_width_,
                           line == 0 ? "slots" : "");
      for (const column& c : columns_) {
        lines += fmt::format("  {:>{}} ", c.heading[line], width(c));
      }
      lines.erase(lines.find_last_not_of(' ') + 1);
      lines += '\n';
    }
    return lines;
  }

  std::string group(const std::string& title, const std::vector<table_line>& lines) const {
    std::string text = "\n" + title + "\n";
    for (const auto& [r, refusal] : lines) {
      text += fmt::format("{:<{}}  {:>6}", r.policy, name_width_, r.slots);
      if (!refusal.empty()) {
        text += "  " + refusal;
      } else {
        for (const column& c : columns_) {
          const auto& x = r.*c.value;
          text += fmt::format("  {:>{}}{}", detail::cell(c, r), width(c),
                              x && detail::is_best(c, *x, lines) ? '*' : ' ');
        }
      }
      text.erase(text.find_last_not_of(' ') + 1);
      text += '\n';
    }
    return text;
  }

 private:
  static std::size_t width(const column& c) {
    const int error = c.standard_error != nullptr ? c.digits + 8 : 6;
    return std::max({c.heading[0].size(), c.heading[1].size(), static_cast<std::size_t>(error)});
  }

  std::vector<column> columns_;
  std::size_t name_width_ = 6;
};

}  // namespace evaluate
