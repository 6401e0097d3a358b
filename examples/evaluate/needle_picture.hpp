/// Picture `needle`: what is still found, by depth and budget.
#pragma once

#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/measure.hpp"

namespace evaluate {

/// One panel a policy, the full cache's first; empty: nothing to show.
inline std::string needle_picture(const std::vector<outcome>& outcomes) {
  struct panel {
    std::string policy;
    std::vector<const outcome*> columns;
  };
  std::vector<panel> panels;
  std::size_t columns = 0;
  for (const outcome& x : outcomes) {
    if (x.result.needle_after) {
      const auto found = std::ranges::find(panels, x.result.policy, &panel::policy);
      auto& p = found == panels.end() ? panels.emplace_back(panel{x.result.policy, {}}) : *found;
      p.columns.push_back(&x);
      ++columns;
    }
  }
  if (panels.empty()) {
    return {};
  }

  std::string script = picture("needle", 800, 400);
  script += fmt::format(
      "set multiplot title \"{{/:Bold Needles found, asked after compression}}\" font ',15'\n"
      "set palette defined (0 '#f7f4f9', 0.25 '#c6dbef', 0.5 '#6baed6', 0.75 '#2171b5', 1 '#08306b')\n"
      "set cbrange [0:100]\n"
      "unset colorbox\n"
      "set yrange [{}:-0.5]\n"
      "set ytics ('start' -0.5, '¼' 2, 'middle' 4.5, '¾' 7, 'end' 9.5)\n"
      "set ylabel 'depth of the needle in the prompt' offset 0.5\n"
      "set border 0\n"
      "set tics scale 0\n"
      "set tmargin at screen 0.80\n"
      "set bmargin at screen 0.20\n",
      depth_bins - 0.5);
  // Panels share the width by their columns; a narrow one still holds its name.
  constexpr double left = 0.1, right = 0.9, gap = 0.018;
  double least = 0;
  const auto share = [](const panel& p) { return std::max(1.6, static_cast<double>(p.columns.size())); };
  for (const panel& p : panels) {
    least += share(p);
  }
  const double unit =
      (right - left - gap * static_cast<double>(panels.size() - 1)) / least;
  double at = left;
  for (std::size_t k = 0; k < panels.size(); ++k) {
    script += fmt::format("$panel{} << end\n", k);
    std::string tics;
    for (std::size_t c = 0; c < panels[k].columns.size(); ++c) {
      const outcome& x = *panels[k].columns[c];
      tics += fmt::format("{}'{}' {}", c == 0 ? "" : ", ", x.result.slots, c);
      for (std::size_t bin = 0; bin < depth_bins; ++bin) {
        const index_t asked = x.needle_after.asked[bin];
        script += fmt::format("{} {} {}\n", c, bin,
                              asked > 0 ? fmt::format("{:.4g}", 100.0 * x.needle_after.right[bin] / asked)
                                        : "NaN");
      }
      script += "\n";
    }
    const double width = unit * share(panels[k]);
    script += fmt::format(
        "end\n"
        "set lmargin at screen {:.4f}\n"
        "set rmargin at screen {:.4f}\n"
        "set xrange [-0.5:{}]\n"
        "set xtics ({})\n"
        "set title \"{}\" font ',12' offset 0,-0.7\n"
        "{}"
        "plot $panel{} using 1:2:(0.48):(0.48):3 with boxxyerror fillstyle solid noborder fillcolor palette\n",
        at, at + width, static_cast<double>(panels[k].columns.size()) - 0.5, tics,
        plain(panels[k].policy),
        k == 0 ? ""
               : "set format y ''\nunset ylabel\n",
        k);
    at += width + gap;
  }
  // The colour bar, beside an empty plot.
  script +=
      "set colorbox user origin screen 0.92,0.20 size 0.018,0.60\n"
      "set cbtics ('0 %' 0, '50 %' 50, '100 %' 100) offset -0.5\n"
      "set label 1 'slots a head' at screen 0.5,0.07 center\n"
      "unset xtics\n"
      "unset title\n"
      "plot [0:1][0:1] -1 with lines linecolor palette z\n";
  return script + "unset multiplot\n";
}

}  // namespace evaluate
