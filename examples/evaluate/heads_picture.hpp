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
  const auto layers = static_cast<index_t>(stats.size()) / heads;
  constexpr int width = 800, height = 330;
  std::string script = picture("heads", width, height);
  script += fmt::format(
      "set multiplot title '{{/:Bold Where query heads look while the model writes the answer}}' "
      "font ',15'\n"
      "set palette defined (0 '#f4f4f4', 1 '#c6dbef', 2 '#6baed6', 3 '#2171b5', 4 '#08306b')\n"
      "set cbrange [0:100]\n"
      "set xrange [-0.5:{}]\n"
      "set yrange [{}:-0.5]\n"
      "set border 0\n"
      "set tics scale 0\n"
      "set xtics {}\n"
      "set ytics {}\n"
      "set tmargin at screen 0.77\n"
      "set bmargin at screen 0.2\n"
      "set xlabel 'query head' offset 0,0.3\n"
      "set ylabel 'layer' offset 1\n"
      "set colorbox user origin screen 0.925,0.2 size 0.018,0.57 noborder\n"
      "set cbtics ('0 %%' 0, '50 %%' 50, '100 %%' 100) offset -0.5\n",
      heads - 0.5, layers - 0.5, std::max(1, (heads + 7) / 8), std::max(1, (layers + 7) / 8));
  constexpr double begin = 0.08, end = 0.905, gap = 0.035;
  constexpr double step = (end - begin + gap) / panels.size();
  for (std::size_t i = 0; i < panels.size(); ++i) {
    script += "$share << end\n";
    for (index_t at = 0; at < layers * heads; ++at) {
      script += fmt::format("{} {} {:.4g}\n", at % heads, at / heads,
                            100 * stats[static_cast<std::size_t>(at)].*panels[i].share);
    }
    const double left = begin + static_cast<double>(i) * step;
    script += fmt::format(
        "end\n"
        "set lmargin at screen {:.4f}\n"
        "set rmargin at screen {:.4f}\n"
        "set title '{}' font ',12' offset 0,-0.6\n"
        "plot $share using 1:2:(0.485):(0.485):3 with boxxyerror fillstyle solid noborder "
        "fillcolor palette\n"
        "unset colorbox; unset ylabel; set format y ''\n",
        left, left + step - gap, panels[i].title);
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
