// SPDX-License-Identifier: MIT
/// Picture `heads`: retrieval, local and sink heads.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/heads.hpp"

namespace evaluate {

/// A panel for each habit, layers over query heads `[layers · heads]`; empty: nothing to show.
inline std::string heads_picture(const std::vector<head_stats>& stats, index_t heads) {
  if (stats.empty()) {
    return {};
  }
  struct panel {
    std::string title;
    double head_stats::*share;
  };
  const std::array panels = {
      panel{"the fact asked for", &head_stats::retrieval},
      panel{fmt::format("the latest {} tokens", local_tokens), &head_stats::local},
      panel{fmt::format("the first {} tokens", sink_tokens), &head_stats::sink}};
  const auto layers = count_of(stats) / heads;
  constexpr int width = 800, height = 330;
  std::string script =
      picture("heads", width, height, "Where query heads look while the model writes the answer") +
      heat_map(0.2, 0.57);
  script += fmt::format(
      "set xrange [-0.5:{}]\n"
      "set yrange [{}:-0.5]\n"
      "set xtics {}\n"
      "set ytics {}\n"
      "set xlabel 'query head' offset 0,0.3\n"
      "set ylabel 'layer' offset 1\n",
      heads - 0.5, layers - 0.5, std::max(1, (heads + 7) / 8), std::max(1, (layers + 7) / 8));
  constexpr double begin = 0.08, end = 0.905, gap = 0.035;
  constexpr double step = (end - begin + gap) / panels.size();
  for (std::size_t i = 0; i < panels.size(); ++i) {
    std::string data;
    for (index_t at = 0; at < layers * heads; ++at) {
      data += fmt::format("{} {} {:.4g}\n", at % heads, at / heads,
                          100 * stats[as_size(at)].*panels[i].share);
    }
    const double left = begin + static_cast<double>(i) * step;
    script +=
        plot_heat("share", data,
                  margins(left, left + step - gap, 0.77, 0.2) +
                      fmt::format("set title '{}' font ',12' offset 0,-0.6\n", panels[i].title)) +
        "unset ylabel; set format y ''\n";
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
