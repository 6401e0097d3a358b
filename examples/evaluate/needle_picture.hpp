/// Picture `needle`: what is still found, by depth and budget.
#pragma once

#include <algorithm>  // std::ranges::find
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/measure.hpp"

namespace evaluate {

/// A panel for each policy, the full cache's first; empty: nothing to show.
inline std::string needle_picture(const std::vector<outcome>& outcomes) {
  struct panel {
    std::string policy;
    std::vector<const outcome*> budgets = {};

    // A narrow one still holds its name.
    double width() const { return std::max(1.7, static_cast<double>(budgets.size())); }
  };
  std::vector<panel> panels;
  for (const outcome& x : outcomes) {
    if (x.result.needle_after) {
      auto found = std::ranges::find(panels, x.result.policy, &panel::policy);
      if (found == panels.end()) {
        found = panels.insert(found, {x.result.policy});
      }
      found->budgets.push_back(&x);
    }
  }
  if (panels.empty()) {
    return {};
  }

  std::string script = picture("needle", 800, 380);
  script += fmt::format(
      "set multiplot title '{{/:Bold Needles found, asked for after compression}}' font ',15'\n"
      "set palette defined (0 '#f4f4f4', 1 '#c6dbef', 2 '#6baed6', 3 '#2171b5', 4 '#08306b')\n"
      "set cbrange [0:100]\n"
      "set yrange [{}:-0.5]\n"
      "set ytics ('start' -0.5, 'middle' {}, 'end' {})\n"
      "set ylabel 'depth in the prompt' offset 1\n"
      "set border 0\n"
      "set tics scale 0\n"
      "set tmargin at screen 0.80\n"
      "set bmargin at screen 0.19\n"
      "set label 1 'budget, slots a head' at screen 0.49,0.05 center\n"
      // One panel draws the colour bar for all.
      "set colorbox user origin screen 0.925,0.19 size 0.018,0.61 noborder\n"
      "set cbtics ('0 %%' 0, '50 %%' 50, '100 %%' 100) offset -0.5\n",
      depth_bins - 0.5, depth_bins / 2.0 - 0.5, depth_bins - 0.5);
  constexpr double begin = 0.1, end = 0.905, gap = 0.018;
  double widths = 0;
  for (const panel& p : panels) {
    widths += p.width();
  }
  const double unit = (end - begin - gap * static_cast<double>(panels.size() - 1)) / widths;
  double left = begin;
  for (const panel& p : panels) {
    std::string tics;
    script += "$found << end\n";
    for (std::size_t b = 0; b < p.budgets.size(); ++b) {
      const auto& [result, found] = *p.budgets[b];
      tics += fmt::format("{}'{}' {}", b == 0 ? "" : ", ", result.slots, b);
      for (std::size_t bin = 0; bin < depth_bins; ++bin) {
        if (found.asked[bin] > 0) {
          script +=
              fmt::format("{} {} {:.4g}\n", b, bin, 100.0 * found.right[bin] / found.asked[bin]);
        }
      }
    }
    const double right = left + unit * p.width();
    script += fmt::format(
        "end\n"
        "set lmargin at screen {:.4f}\n"
        "set rmargin at screen {:.4f}\n"
        "set xrange [-0.5:{}]\n"
        "set xtics ({})\n"
        "set title '{}' noenhanced font ',12' offset 0,-0.6\n"
        "plot $found using 1:2:(0.485):(0.485):3 with boxxyerror fillstyle solid noborder "
        "fillcolor palette\n"
        "unset ylabel; unset ytics; unset colorbox; unset label 1\n",
        left, right, static_cast<double>(p.budgets.size()) - 0.5, tics, p.policy);
    left = right + gap;
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
