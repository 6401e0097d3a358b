// SPDX-License-Identifier: MIT
/// Line charts: a curve for each policy in every panel, the best policies of the run in colour.
#pragma once

#include <algorithm>  // std::ranges::any_of, find, stable_partition, stable_sort
#include <array>
#include <cmath>       // std::log
#include <functional>  // std::function, std::greater
#include <limits>      // std::numeric_limits
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>  // std::move
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

/// Does the row keep all of the prompt?
inline bool keeps_all(const row& r) { return r.policy.starts_with("full_cache"); }

/// The policies that evict, in the order of their lines: the best by each figure that was measured,
/// the next best by each, and so on.
inline std::vector<std::string> by_all_figures(const std::vector<row>& rows) {
  std::vector<std::string> policies, order;
  for (const row& r : rows) {
    if (!keeps_all(r) && std::ranges::find(policies, r.policy) == policies.end()) {
      policies.push_back(r.policy);
    }
  }
  std::vector<std::vector<std::string>> ranked;
  for (const figure f : {&row::attention_error, &row::kl, &row::needle_after, &row::stream_error}) {
    if (std::ranges::any_of(rows, [f](const row& r) { return (r.*f).has_value(); })) {
      ranked.push_back(by_error(rows, policies, f));
      if (f == &row::needle_after) {  // the more, the better
        std::ranges::stable_sort(ranked.back(), std::greater{}, [&](const std::string& policy) {
          double sum = 0;
          for (const row& r : rows) {
            sum += r.policy == policy ? mean_of(r.*f) : 0;
          }
          return sum;
        });
      }
    }
  }
  for (std::size_t i = 0; i < policies.size(); ++i) {
    for (const auto& by_figure : ranked) {
      if (std::ranges::find(order, by_figure[i]) == order.end()) {
        order.push_back(by_figure[i]);
      }
    }
  }
  return order;
}

/// So many policies are in colour.
inline constexpr std::size_t most_coloured = 7;

/// The policies in colour, each in the same one in all pictures of a run. Those that most pictures
/// show have the same in every run, others the first that is free.
class palette {
 public:
  explicit palette(std::vector<std::string> in_order) : policies_(std::move(in_order)) {
    policies_.resize(std::min(policies_.size(), most_coloured));
    constexpr std::array known = {"fold", "fold+equal", "kvzip", "h2o", "keepkv", "snapkv"};
    colours_.assign(policies_.size(), most_coloured);
    std::set<std::size_t> taken;
    for (const bool own : {true, false}) {
      for (std::size_t i = 0; i < policies_.size(); ++i) {
        auto c = static_cast<std::size_t>(std::ranges::find(known, policies_[i]) - known.begin());
        if (own == (c < known.size())) {
          for (c = own ? c : 0; taken.contains(c);) {
            ++c;
          }
          taken.insert(colours_[i] = c);
        }
      }
    }
  }
  explicit palette(const std::vector<row>& rows) : palette(by_all_figures(rows)) {}

  /// The number of a policy's colour, of those that `colour` names; none: it is grey.
  std::optional<std::size_t> colour_of(const std::string& policy) const {
    const auto at = std::ranges::find(policies_, policy);
    return at == policies_.end()
               ? std::nullopt
               : std::optional(colours_[static_cast<std::size_t>(at - policies_.begin())]);
  }
  /// Moves what is in colour to the front; how many these are.
  std::size_t to_front(std::vector<std::string>& policies) const {
    const auto grey = std::ranges::stable_partition(
        policies, [&](const std::string& policy) { return colour_of(policy).has_value(); });
    return static_cast<std::size_t>(grey.begin() - policies.begin());
  }

 private:
  std::vector<std::string> policies_;
  std::vector<std::size_t> colours_;
};

/// A line of a legend besides those of policies: how it is drawn, and what it says.
struct named_style {
  std::string style, name;
};

/// Line styles of `policies`, those in colour first, and one of all others; their names, and
/// `more` after them.
inline std::string styles(const std::vector<std::string>& policies, const palette& colours,
                          int width, int height, const std::vector<named_style>& more = {}) {
  std::vector<named_style> all;
  for (const std::string& policy : policies) {
    if (const auto c = colours.colour_of(policy)) {
      all.push_back({fmt::format("linecolor '{}' linewidth 2.5 pointtype {} pointsize 0.8",
                                 colour(*c), std::array{7, 5, 9, 11, 13, 15, 3}[*c]),
                     policy});
    }
  }
  const std::size_t others = policies.size() - all.size();
  all.push_back({"linecolor '#cccccc' linewidth 1.2 pointtype 0",
                 fmt::format("{} other{}", others, others == 1 ? "" : "s")});
  all.insert(all.end(), more.begin(), more.end());
  std::string script;
  std::vector<legend_entry> shown;
  for (std::size_t i = 0; i < all.size(); ++i) {
    script += fmt::format("set style line {} {}\n", i + 1, all[i].style);
    if (others > 0 || i + more.size() + 1 != all.size()) {
      shown.push_back({all[i].name, i + 1});
    }
  }
  return script + legend(shown, 0.045, width, height);
}

/// Curves `[policies]` of `x y` or `x y error` a line, the `in_colour` first on top; an empty one
/// is not drawn. Data blocks are named `name` and the curve's number.
inline std::string plot_curves(const std::string& name, const std::vector<std::string>& curves,
                               std::size_t in_colour, const std::string& settings = {},
                               bool bars = false) {
  std::string data, plots;
  for (std::size_t i = curves.size(); i-- > 0;) {
    if (!curves[i].empty()) {
      data += fmt::format("${}{} << end\n{}end\n", name, i, curves[i]);
      plots += fmt::format("{}${}{} with {} linestyle {}", plots.empty() ? "" : ", ", name, i,
                           bars && i < in_colour ? "yerrorlines" : "linespoints",
                           std::min(i, in_colour) + 1);
    }
  }
  return data + settings + "plot " + plots + "\n";
}

/// Panel `k`: its curves, behind `settings`.
inline std::string plot_panel(const std::vector<row>& rows, const line_panel& p, std::size_t k,
                              const std::vector<std::string>& policies, std::size_t in_colour,
                              double left, double right, const std::string& settings,
                              bool bars = false) {
  std::vector<std::string> curves(policies.size());
  for (std::size_t i = 0; i < policies.size(); ++i) {
    for (const row& r : rows) {
      if (const auto shown = r.policy == policies[i] ? p.point_of(r) : std::nullopt) {
        curves[i] += fmt::format("{:.6g} {:.6g}", shown->x, shown->y) +
                     (shown->error ? fmt::format(" {:.3g}\n", *shown->error) : "\n");
      }
    }
  }
  return plot_curves(fmt::format("panel{}_", k), curves, in_colour,
                     fmt::format("set lmargin at screen {:.3f}\nset rmargin at screen {:.3f}\n{}",
                                 left, right, settings),
                     bars);
}

}  // namespace evaluate
