// SPDX-License-Identifier: MIT
/// Line charts: a curve for each policy in every panel, the best policies in colour.
#pragma once

#include <algorithm>  // std::ranges::stable_sort
#include <array>
#include <cmath>  // std::log
#include <functional>
#include <limits>  // std::numeric_limits
#include <set>
#include <span>
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/row.hpp"

namespace evaluate {

/// What a row shows in a panel.
struct point {
  double x = 0, y = 0;
  std::optional<double> error = {};  ///< of `y`
};

struct line_panel {
  figure value;
  std::string title;
  std::function<std::optional<point>(const row&)> point_of;
};

/// Coordinates of all points, in order.
inline std::set<double> coordinates(const std::vector<row>& rows,
                                    std::span<const line_panel> panels, double point::*of) {
  std::set<double> all;
  for (const line_panel& p : panels) {
    for (const row& r : rows) {
      if (const auto shown = p.point_of(r)) {
        all.insert(*shown.*of);
      }
    }
  }
  return all;
}

/// Policies with a point in any panel.
inline std::vector<std::string> policies_of(const std::vector<row>& rows,
                                            std::span<const line_panel> panels) {
  std::vector<std::string> policies;
  for (const line_panel& p : panels) {
    for (const row& r : rows) {
      if (p.point_of(r) && std::ranges::find(policies, r.policy) == policies.end()) {
        policies.push_back(r.policy);
      }
    }
  }
  return policies;
}

/// The policies of least error first, on the geometric mean of all budgets.
inline std::vector<std::string> by_error(const std::vector<row>& rows,
                                         std::vector<std::string> policies, figure value) {
  const auto mean = [&](const std::string& policy) {
    double sum = 0;
    int count = 0;
    for (const row& r : rows) {
      if (const double error = mean_of(r.*value); r.policy == policy && error > 0) {
        sum += std::log(error), ++count;
      }
    }
    return count > 0 ? sum / count : std::numeric_limits<double>::infinity();
  };
  std::ranges::stable_sort(policies, {}, mean);
  return policies;
}

/// So many policies are in colour.
inline constexpr std::size_t coloured = 7;

/// The colour of each of the first `count` policies, by number: those that most pictures show have
/// the same in all of them, others the first that is free.
inline std::vector<std::size_t> colours_of(const std::vector<std::string>& policies,
                                           std::size_t count) {
  constexpr std::array known = {"fold", "fold+equal", "kvzip", "h2o", "keepkv", "snapkv"};
  std::vector<std::size_t> colours(count, coloured);
  std::set<std::size_t> taken;
  for (const bool own : {true, false}) {
    for (std::size_t i = 0; i < count; ++i) {
      auto c = static_cast<std::size_t>(std::ranges::find(known, policies[i]) - known.begin());
      if (own == (c < known.size())) {
        for (c = own ? c : 0; taken.contains(c);) {
          ++c;
        }
        taken.insert(colours[i] = c);
      }
    }
  }
  return colours;
}

/// Line styles of `policies`, the last one that of all that are not in colour, and their names.
inline std::string styles(const std::vector<std::string>& policies, int width, int height) {
  const std::size_t count = std::min(policies.size(), coloured);
  const auto colours = colours_of(policies, count);
  std::string script;
  for (std::size_t i = 0; i < count; ++i) {
    script +=
        fmt::format("set style line {} linecolor '{}' linewidth 2.5 pointtype {} pointsize 0.8\n",
                    i + 1, colour(colours[i]), std::array{7, 5, 9, 11, 13, 15, 3}[colours[i]]);
  }
  script += fmt::format("set style line {} linecolor '#cccccc' linewidth 1.2 pointtype 0\n",
                        coloured + 1);
  std::vector<std::string> named(policies.begin(),
                                 policies.begin() + static_cast<std::ptrdiff_t>(count));
  if (const std::size_t others = policies.size() - count; others > 0) {
    named.push_back(fmt::format("{} other{}", others, others == 1 ? "" : "s"));
  }
  return script + legend(named, 0.045, width, height);
}

/// Curves `[policies]` of `x y` or `x y error` a line, the best on top; an empty one is not drawn.
/// Data blocks are named `name` and the curve's number.
inline std::string plot_curves(const std::string& name, const std::vector<std::string>& curves,
                               const std::string& settings = {}, bool bars = false) {
  std::string data, plots;
  for (std::size_t i = curves.size(); i-- > 0;) {
    if (!curves[i].empty()) {
      data += fmt::format("${}{} << end\n{}end\n", name, i, curves[i]);
      plots += fmt::format("{}${}{} with {} linestyle {}", plots.empty() ? "" : ", ", name, i,
                           bars && i < coloured ? "yerrorlines" : "linespoints",
                           std::min(i, coloured) + 1);
    }
  }
  return data + settings + "plot " + plots + "\n";
}

/// Panel `k`: its curves, behind `settings`.
inline std::string plot_panel(const std::vector<row>& rows, const line_panel& p, std::size_t k,
                              const std::vector<std::string>& policies, double left, double right,
                              const std::string& settings, bool bars = false) {
  std::vector<std::string> curves(policies.size());
  for (std::size_t i = 0; i < policies.size(); ++i) {
    for (const row& r : rows) {
      if (const auto shown = r.policy == policies[i] ? p.point_of(r) : std::nullopt) {
        curves[i] += fmt::format("{:.6g} {:.6g}", shown->x, shown->y) +
                     (shown->error ? fmt::format(" {:.3g}\n", *shown->error) : "\n");
      }
    }
  }
  return plot_curves(fmt::format("panel{}_", k), curves,
                     fmt::format("set lmargin at screen {:.3f}\nset rmargin at screen {:.3f}\n{}",
                                 left, right, settings),
                     bars);
}

}  // namespace evaluate
