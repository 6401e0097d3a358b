// SPDX-License-Identifier: MIT
/// Picture `retention`: every token at every step, a panel for each policy.
#pragma once

#include <algorithm>  // std::min
#include <string>
#include <vector>

#include "evaluate/gnuplot.hpp"
#include "evaluate/plan.hpp"
#include "evaluate/retention.hpp"

namespace evaluate {

inline constexpr index_t retention_slots = 64, retention_steps = 384;

/// What the colours mean, from the upper left corner at `x`, `y` of the screen; boxes of `w`, `h`.
inline std::string retention_legend(double x, double y, double w, double h) {
  std::string script;
  const auto text = [&](const char* words, double indent) {
    script += fmt::format("set label '{}' at screen {:.4f},{:.4f} left\n", words, x + indent * w,
                          y - h / 2);
    y -= 1.9 * h;
  };
  for (const auto& [fill, words] : {std::pair{"#0072b2", "kept by itself"},
                                    {"#f0b43c", "merged with others"},
                                    {"#e6e6e6", "evicted"}}) {
    script += fmt::format(
        "set object rectangle from screen {:.4f},{:.4f} to screen {:.4f},{:.4f} "
        "fillcolor '{}' fillstyle solid noborder\n",
        x, y - h, x + w, y, fill);
    text(words, 1.6);
  }
  y -= h;
  text(fmt::format("{} slots, a row a token,", retention_slots).c_str(), 0);
  text("one head, middle layer", 0);
  return script;
}

/// Of the middle layer's first KV head; empty: nothing to show.
inline std::string retention_picture(const plan& todo, const engine::config& shape,
                                     const dataset& m) {
  std::vector<const named_policy*> policies;
  for (const named_policy& p : todo.policies) {
    if (p.policy.evicts() && p.policy.supports_decode() &&
        p.budgets == budget_allocation::uniform && p.storage == storage::f32 &&
        detail::refusal_of(p.policy, p.storage, retention_slots, shape.dim).empty()) {
      policies.push_back(&p);
    }
  }
  const index_t steps = std::min(retention_steps, todo.longest_stream);
  if (policies.empty() || m.streams.empty() || steps <= retention_slots) {
    return {};
  }
  const auto& layers = m.streams.front().layers;
  const auto& layer = layers[layers.size() / 2];

  // As many panels abreast as leave the fewest places empty; the legend takes one place.
  const std::size_t places = policies.size() + 1;
  const auto empty = [&](std::size_t abreast) { return (abreast - places % abreast) % abreast; };
  const std::size_t abreast = places <= 9 && empty(3) <= empty(4) ? 3 : 4,
                    lines = (places - 1) / abreast + 1;
  constexpr double width = 800, left = 46, top = 66, between = 34;
  const double side =
      (width - left - 14 - 16 * static_cast<double>(abreast - 1)) / static_cast<double>(abreast);
  const double height = top + static_cast<double>(lines) * (side + between) + 14;
  const auto corner = [&](std::size_t place) {  // upper left, in pixels
    return std::pair(left + static_cast<double>(place % abreast) * (side + 16),
                     top + static_cast<double>(place / abreast) * (side + between));
  };

  std::string script = picture("retention", static_cast<int>(width), static_cast<int>(height));
  script += fmt::format(
      "set multiplot title '{{/:Bold What becomes of every token while decoding}}' font ',15'\n"
      "set palette defined (0 '#ffffff', 1 '#0072b2', 2 '#f0b43c', 3 '#e6e6e6') maxcolors 4\n"
      "set cbrange [-0.5:3.5]\n"
      "unset colorbox\n"
      "set border 3\n"
      "set tics scale 0.4 font ',11'\n"
      "set xrange [0:{0}]\n"
      "set yrange [0:{0}]\n"
      "set xtics 0,{1},{2} offset 0,0.4\n"
      "set ytics {1} offset 0.6\n",
      steps, steps / 3, 0.9 * steps);
  constexpr std::size_t stride = 2;  // steps drawn: a panel has no more pixels
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const auto fates = follow(policies[i]->policy, shape, layer, 0, steps,
                              kvmeld::budget_within(policies[i]->policy, retention_slots));
    script += fmt::format("$fates{} << end\n", i);
    for (std::size_t t = 0; t < fates.size(); ++t) {
      for (std::size_t s = 0; s < fates.size(); s += stride) {
        script += static_cast<char>('0' + static_cast<int>(fates[s][t]));
        script += ' ';
      }
      script.back() = '\n';
    }
    script += "end\n";
    if (i + 1 == policies.size()) {  // objects are drawn with every plot: with the last one only
      const auto [from, upper] = corner(policies.size());
      script += retention_legend((from + 24) / width, 1 - (upper + 0.2 * side) / height, 14 / width,
                                 14 / height);
    }
    const auto [x, y] = corner(i);
    const bool lowest = i + abreast >= policies.size();
    script += fmt::format(
        "set lmargin at screen {:.4f}\n"
        "set rmargin at screen {:.4f}\n"
        "set tmargin at screen {:.4f}\n"
        "set bmargin at screen {:.4f}\n"
        "set title '{}' noenhanced offset 0,-0.8\n"
        "set format x '{}'\n"
        "set format y '{}'\n"
        "{}\n"
        "{}\n"
        "plot $fates{} matrix using ($1 * {} + 1):($2 + 0.5):3 with image\n",
        x / width, (x + side) / width, 1 - y / height, 1 - (y + side) / height, policies[i]->name,
        lowest ? "%g" : "", i % abreast == 0 ? "%g" : "",
        lowest ? "set xlabel 'step' offset 0,1" : "unset xlabel",
        i % abreast == 0 ? "set ylabel 'token' offset 1.8" : "unset ylabel", i, stride);
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
