/// Picture `retention`: every token at every step, a panel for each policy.
#pragma once

#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/plan.hpp"
#include "evaluate/retention.hpp"

namespace evaluate {

inline constexpr index_t retention_slots = 64, retention_steps = 384;

/// Of the middle layer's first KV head; empty: nothing to show.
inline std::string retention_picture(const plan& todo, const engine::config& shape,
                                     const material& m) {
  std::vector<const named_policy*> policies;
  for (const named_policy& p : todo.policies) {
    if (p.policy.bounded() && detail::refusal_of(p.policy, retention_slots).empty()) {
      policies.push_back(&p);
    }
  }
  const index_t steps = std::min(retention_steps, todo.longest_stream);
  if (policies.empty() || m.streams.empty() || steps <= retention_slots) {
    return {};
  }

  // As many columns as leave the fewest places empty; the legend takes one.
  const std::size_t places = policies.size() + 1;
  std::size_t columns = 4;
  for (const std::size_t fewer : {3U, 2U}) {
    const auto empty = [&](std::size_t c) { return (places + c - 1) / c * c - places; };
    columns = empty(fewer) < empty(columns) ? fewer : columns;
  }
  const std::size_t lines = (places + columns - 1) / columns;
  const double width = 760.0 / static_cast<double>(columns), height = width + 10;
  const int total = 50 + static_cast<int>(height * static_cast<double>(lines));
  std::string script = picture("retention", 800, total);
  script += fmt::format(
      "set multiplot title \"{{/:Bold What becomes of every token}} ({} slots)\" font ',15'\n"
      "set palette defined (0 '#ffffff', 1 '#0072b2', 2 '#e69f00', 3 '#e4e4e4') maxcolors 4\n"
      "set cbrange [-0.5:3.5]\n"
      "unset colorbox\n"
      "set xrange [-0.5:{}]\n"
      "set yrange [-0.5:{}]\n"
      "set xtics {}\n"
      "set ytics {}\n",
      retention_slots, steps - 0.5, steps - 0.5, steps / 4, steps / 4);
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const auto fates = follow(policies[i]->policy, shape, m.streams[0].layers[m.streams[0].layers.size() / 2], 0,
                              steps, {retention_slots});
    script += fmt::format("$fates{} << end\n", i);
    for (std::size_t t = 0; t < fates.size(); ++t) {
      for (const auto& step : fates) {
        script += static_cast<char>('0' + static_cast<int>(step[t]));
        script += ' ';
      }
      script += '\n';
    }
    const auto column = static_cast<double>(i % columns), line = static_cast<double>(i / columns);
    script += fmt::format(
        "end\n"
        "set lmargin at screen {:.4f}\n"
        "set rmargin at screen {:.4f}\n"
        "set tmargin at screen {:.4f}\n"
        "set bmargin at screen {:.4f}\n"
        "set title \"{}\" offset 0,-0.7\n"
        "set xlabel 'step' offset 0,0.6\n"
        "set ylabel 'token' offset 1.2\n"
        "plot $fates{} matrix with image\n",
        (40 + column * width + 25) / 800, (40 + (column + 1) * width - 15) / 800,
        1 - (70 + line * height) / total, 1 - (70 + (line + 1) * height - 75) / total, plain(policies[i]->name),
        i);
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
