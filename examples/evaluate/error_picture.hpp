// SPDX-License-Identifier: MIT
/// Picture `error`: attention error against budget, after a prompt and while streaming.
#pragma once

#include <algorithm>  // std::ranges::find
#include <cmath>      // std::log
#include <limits>     // std::numeric_limits
#include <set>
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/row.hpp"

namespace evaluate {

namespace detail {

/// The policies in the order of their lines: those of least error first, on the geometric mean of
/// all budgets that every policy has, in colour; the others behind.
inline std::vector<std::string> by_error(const std::vector<row>& rows,
                                         std::vector<std::string> policies,
                                         std::optional<double> row::*value) {
  const auto mean = [&](const std::string& policy) {
    double sum = 0;
    int count = 0;
    for (const row& r : rows) {
      if (r.policy == policy && (r.*value).value_or(0) > 0) {
        sum += std::log(*(r.*value)), ++count;
      }
    }
    return count > 0 ? sum / count : std::numeric_limits<double>::infinity();
  };
  std::ranges::stable_sort(policies, {}, mean);
  return policies;
}

/// So many policies are in colour.
inline constexpr std::size_t coloured = 7;

/// Line styles of `policies`, the last one that of all that are not in colour, and their names.
inline std::string styles(const std::vector<std::string>& policies, int width, int height) {
  const std::size_t count = std::min(policies.size(), coloured);
  std::string script;
  for (std::size_t i = 0; i < count; ++i) {
    script +=
        fmt::format("set style line {} linecolor '{}' linewidth 2.5 pointtype {} pointsize 0.8\n",
                    i + 1, colour(i), std::array{7, 5, 9, 11, 13, 15, 3}[i]);
  }
  script += fmt::format("set style line {} linecolor '#cccccc' linewidth 1.2 pointtype 0\n",
                        coloured + 1);
  std::vector<std::string> named(policies.begin(),
                                 policies.begin() + static_cast<std::ptrdiff_t>(count));
  if (policies.size() > coloured) {
    named.push_back(others(policies.size() - coloured));
  }
  return script + legend(named, 0.045, width, height);
}

}  // namespace detail

/// The policies of least error are in colour, the others grey. Both axes are logarithmic, and both
/// panels have the same: what is without loss is not shown. Empty: nothing to show.
inline std::string error_picture(const std::vector<row>& rows, index_t prompt) {
  struct panel {
    std::optional<double> row::*value, row::*standard_error;
    std::string title;
    bool any = false;
  };
  std::array panels = {panel{&row::attention_error, &row::attention_error_se,
                             fmt::format("after a prompt of {} tokens", prompt)},
                       panel{&row::stream_error, nullptr, "while decoding 10 times the budget"}};
  const auto shows = [](const row& r, const panel& p) { return (r.*p.value).value_or(0) > 0; };
  std::vector<std::string> policies;
  std::set<index_t> budgets;
  std::set<double> errors;
  for (panel& p : panels) {
    for (const row& r : rows) {
      if (shows(r, p)) {
        p.any = true;
        budgets.insert(r.slots);
        errors.insert(*(r.*p.value));
        if (std::ranges::find(policies, r.policy) == policies.end()) {
          policies.push_back(r.policy);
        }
      }
    }
  }
  if (policies.empty()) {
    return {};
  }
  policies = detail::by_error(rows, policies, panels[panels[0].any ? 0 : 1].value);
  constexpr int width = 800, height = 420;
  std::string script = picture("error", width, height);
  script += fmt::format(
      "set multiplot title '{{/:Bold How far attention is off}}' font ',15'\n"
      "set logscale xy\n"
      "set xrange [{}:{}]\n"
      "set yrange [{:.3g}:{:.3g}]\n"
      "set xtics ({})\n"
      "set ytics ({})\n"
      "set grid ytics linetype 1 linecolor '#e0e0e0' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'budget, slots per head' offset 0,0.2\n"
      "set tmargin at screen 0.82\n"
      "set bmargin at screen 0.27\n",
      0.87 * *budgets.begin(), 1.15 * *budgets.rbegin(), 0.9 * *errors.begin(),
      1.1 * *errors.rbegin(), fmt::join(budgets, ", "),
      *errors.rbegin() < 8 * *errors.begin()
          ? "0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, "
            "0.6, 0.8, 1, 1.2, 1.5, 2"
          : "0.0001, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10");
  script += detail::styles(policies, width, height);
  const bool both = panels[0].any && panels[1].any;
  double left = 0.1;
  for (std::size_t k = 0; k < panels.size(); ++k) {
    if (!panels[k].any) {
      continue;
    }
    std::string plots;
    for (std::size_t i = policies.size(); i-- > 0;) {  // the best on top
      if (std::ranges::none_of(
              rows, [&](const row& r) { return r.policy == policies[i] && shows(r, panels[k]); })) {
        continue;
      }
      script += fmt::format("$panel{}_{} << end\n", k, i);
      for (const row& r : rows) {
        if (r.policy == policies[i] && shows(r, panels[k])) {
          const auto error =
              panels[k].standard_error != nullptr ? r.*panels[k].standard_error : std::nullopt;
          script +=
              fmt::format("{} {:.6g} {:.3g}\n", r.slots, *(r.*panels[k].value), error.value_or(0));
        }
      }
      script += "end\n";
      plots +=
          fmt::format("{}$panel{}_{} with {} linestyle {}", plots.empty() ? "" : ", ", k, i,
                      i < detail::coloured && panels[k].standard_error != nullptr ? "yerrorlines"
                                                                                  : "linespoints",
                      std::min(i, detail::coloured) + 1);
    }
    const double right = both ? left + 0.412 : 0.97;
    script += fmt::format(
        "set lmargin at screen {:.3f}\n"
        "set rmargin at screen {:.3f}\n"
        "set title '{}' offset 0,-0.4\n"
        "{}plot {}\n",
        left, right, panels[k].title,
        left < 0.2 ? "set ylabel 'relative error  ‖o′ − o‖ / ‖o‖' offset 1\n"
                   : "unset ylabel\nunset label\nset format y ''\n",
        plots);
    left = right + 0.045;
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
