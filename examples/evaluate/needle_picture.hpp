// SPDX-License-Identifier: MIT
/// Picture `needle`: what is still found, by depth and budget.
#pragma once

#include <algorithm>  // std::ranges::find
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/measure.hpp"

namespace evaluate {

/// A panel for each policy, the full cache's first; those that found the same as it, and those that
/// found nothing, are named below. Empty: nothing to show.
inline std::string needle_picture(const std::vector<outcome>& outcomes) {
  struct panel {
    std::string policy;
    std::vector<const outcome*> budgets = {};
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
  const panel first = panels.front();
  std::string named;  // below the panels: which policies have none, and why, in lines
  const auto name_below = [&](const std::string& what, auto which) {
    std::size_t letters = 0;
    std::string names;
    std::erase_if(panels, [&](const panel& p) {
      const bool is_named = which(p);
      if (is_named) {
        const bool full = letters + p.policy.size() > 100;
        names += (names.empty() ? what + ": " : full ? ",\\n" : ", ") + p.policy;
        letters = (full ? 0 : letters) + p.policy.size() + 2;
      }
      return is_named;
    });
    named += (named.empty() || names.empty() ? "" : "\\n") + names;
  };
  name_below("as " + first.policy, [&](const panel& p) {
    return p.policy.starts_with(first.policy + "/") &&
           p.budgets.front()->needle_after.right == first.budgets.front()->needle_after.right;
  });
  name_below("none found", [](const panel& p) {
    return std::ranges::none_of(p.budgets,
                                [](const outcome* x) { return x->needle_after.share().mean > 0; });
  });
  if (panels.empty()) {
    panels.push_back(first);
  }

  // Lines of panels of one size.
  constexpr std::size_t most_abreast = 6;
  const std::size_t lines = (panels.size() - 1) / most_abreast + 1;
  const std::size_t abreast = (panels.size() - 1) / lines + 1;
  constexpr int width = 800;
  constexpr double panel_height = 200, above = 74, below = 110, between = 80, letter = 7;  // pixels
  const double height = above + below + static_cast<double>(lines) * panel_height +
                        static_cast<double>(lines - 1) * between;
  std::string script = picture("needle", width, static_cast<int>(height),
                               "Needles found, asked for after compression") +
                       heat_map(1 - (above + panel_height) / height, panel_height / height);
  script += fmt::format(
      "set yrange [{}:-0.5]\n"
      "set label 1 'budget, slots per head' at screen 0.49,{:.4f} center\n"
      "set label 2 \"{}\" noenhanced at screen 0.1,{:.4f} font ',11'\n",
      depth_bins - 0.5, 72 / height, named, 48 / height);
  constexpr double begin = 0.1, end = 0.905, gap = 0.018;
  const double step = (end - begin + gap) / static_cast<double>(abreast);
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const panel& p = panels[i];
    std::string tics, data;
    for (std::size_t b = 0; b < p.budgets.size(); ++b) {
      const row& result = p.budgets[b]->result;
      const recall& found = p.budgets[b]->needle_after;
      tics += fmt::format("{}'{}' {}", b == 0 ? "" : ", ", result.slots, b);
      for (std::size_t bin = 0; bin < depth_bins; ++bin) {
        if (found.asked[bin] > 0) {
          data +=
              fmt::format("{} {} {:.4g}\n", b, bin, 100.0 * found.right[bin] / found.asked[bin]);
        }
      }
    }
    const double left = begin + static_cast<double>(i % abreast) * step;
    std::string title = p.policy;
    if (const std::size_t division = title.find('+');
        division != std::string::npos &&
        letter * static_cast<double>(title.size()) > (step - gap) * width) {
      title.insert(division, "\\n");
    }
    const double top =
        above + static_cast<double>(i / abreast) * (panel_height + between);  // from above
    const std::string settings = fmt::format(
        "set xrange [-0.5:{}]\n"
        "set xtics ({})\n"
        "{}\n"
        "set title \"{}\" noenhanced font ',12' offset 0,-0.6\n",
        static_cast<double>(p.budgets.size()) - 0.5, tics,
        i % abreast == 0 ? fmt::format("set ylabel 'depth in the prompt' offset 1; "
                                       "set ytics scale 0 ('start' -0.5, 'middle' {}, 'end' {})",
                                       depth_bins / 2.0 - 0.5, depth_bins - 0.5)
                         : "unset ylabel; unset ytics",
        title);
    script += plot_heat("found", data,
                        margins(left, left + step - gap, 1 - top / height,
                                1 - (top + panel_height) / height) +
                            settings) +
              "unset label 1; unset label 2\n";
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
