/// Picture `error`: attention error against budget, after a prompt and while streaming.
#pragma once

#include <algorithm>  // std::ranges::find
#include <set>
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/row.hpp"

namespace evaluate {

/// Empty: nothing to show.
inline std::string error_picture(const std::vector<row>& rows, index_t prompt) {
  struct panel {
    std::optional<double> row::*value;
    std::string title;
  };
  // Only what is compressed, and not without loss: the axes are logarithmic.
  const auto shows = [](const row& r, const panel& p) { return r.*p.value && *(r.*p.value) > 0; };
  std::vector<panel> panels;
  std::vector<std::string> policies;
  std::set<index_t> budgets;
  for (const panel& p :
       {panel{&row::attention_error, fmt::format("after a prompt of {} tokens", prompt)},
        panel{&row::stream_error, "while decoding 10 × the budget"}}) {
    bool any = false;
    for (const row& r : rows) {
      if (shows(r, p)) {
        any = true;
        budgets.insert(r.slots);
        if (std::ranges::find(policies, r.policy) == policies.end()) {
          policies.push_back(r.policy);
        }
      }
    }
    if (any) {
      panels.push_back(p);
    }
  }
  if (panels.empty()) {
    return {};
  }

  std::string script = picture("error", 800, 430);
  script += fmt::format(
      "set multiplot title \"{{/:Bold Error of the attention output}}\" font ',15'\n"
      "set logscale xy\n"
      "set xrange [{}:{}]\n"
      "set xtics ({})\n"
      "set mxtics 1\n"
      "set ytics (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1)\n"
      "set grid ytics linecolor '#dddddd' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'slots a head'\n"
      "set tmargin at screen 0.84\n"
      "set bmargin at screen 0.26\n",
      0.85 * *budgets.begin(), 1.18 * *budgets.rbegin(), fmt::join(budgets, ", "));
  for (std::size_t i = 0; i < policies.size(); ++i) {
    script += fmt::format("set style line {} linecolor '{}' linewidth 2.5 pointtype {} pointsize 0.8\n",
                          i + 1, colour(i), std::array{7, 5, 9, 11, 13, 15, 3}[i % 7]);
  }
  for (std::size_t k = 0; k < panels.size(); ++k) {
    std::string plots;
    for (std::size_t i = 0; i < policies.size(); ++i) {
      script += fmt::format("$panel{}_{} << end\n", k, i);
      for (const row& r : rows) {
        if (r.policy == policies[i] && shows(r, panels[k])) {
          script += fmt::format("{} {:.6g}\n", r.slots, *(r.*panels[k].value));
        }
      }
      script += "end\n";
      plots += fmt::format("{}$panel{}_{} with linespoints linestyle {} title \"{}\"",
                           i == 0 ? "" : ", ", k, i, i + 1, plain(policies[i]));
    }
    const double width = 0.89 / static_cast<double>(panels.size());
    const double left = 0.1 + static_cast<double>(k) * (width + 0.015);
    script += fmt::format(
        "set lmargin at screen {:.3f}\n"
        "set rmargin at screen {:.3f}\n"
        "set title '{}' offset 0,-0.5\n"
        "{}\n"
        "{}\n"
        "plot {}\n",
        left, left + width - 0.055, panels[k].title,
        k == 0 ? "set ylabel \"‖o' − o‖ / ‖o‖\"" : "unset ylabel",
        k == 0 ? fmt::format("set key at screen 0.5,0.07 center center horizontal maxrows {} "
                             "samplen 2 width 1",
                             policies.size() > 6 ? 2 : 1)
               : "unset key",
        plots);
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
