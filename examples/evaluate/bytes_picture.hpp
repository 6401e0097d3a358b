// SPDX-License-Identifier: MIT
/// Picture `bytes`: what compression costs against the bytes that it holds, state included.
#pragma once

#include <algorithm>  // std::min, std::ranges::any_of, remove_copy_if, stable_sort
#include <cmath>      // std::pow
#include <iterator>   // std::back_inserter
#include <map>
#include <set>
#include <string>
#include <vector>

#include "evaluate/lines.hpp"

namespace evaluate {

/// Facts are a share of the cases, from 0 to 1; other figures are on a logarithmic axis.
inline bool is_share(const line_panel& p) { return p.value == &row::needle_after; }

/// Full caches of the same bytes, or as good as, by name and MiB: above the panels, where a line
/// of each begins.
inline std::string full_caches(const std::vector<row>& rows, double least_ratio) {
  std::map<double, std::string> names;
  for (const row& r : rows) {
    if (keeps_all(r) && r.bytes) {
      const std::string name = r.policy.substr(std::min(r.policy.find('/'), r.policy.size()));
      names[r.bytes->mean / (1 << 20)] += (name.empty() ? "float32" : name.substr(1)) + ", ";
    }
  }
  std::string script;
  for (auto at = names.begin(); at != names.end();) {
    const double mib = at->first;
    std::string together;
    for (; at != names.end() && at->first < least_ratio * mib; ++at) {
      together += at->second;
    }
    script += fmt::format(
        "set arrow from first {0:.6g},graph 0 to first {0:.6g},graph 1 nohead back "
        "linecolor '#999999' dashtype 3\n"
        "set label '{1}' noenhanced at first {0:.6g},graph 1.03 rotate by 90 left font ',11'\n",
        mib, together.substr(0, together.size() - 2));
  }
  return script;
}

/// Steps through the rows that no other beats with as few bytes, under all else, and rings around
/// full caches.
inline std::string frontier(const std::vector<row>& rows, const line_panel& p) {
  std::vector<point> points;
  std::string script;
  for (const row& r : rows) {
    if (const auto shown = p.point_of(r)) {
      points.push_back(*shown);
      script += keeps_all(r) ? fmt::format(
                                   "set label '' at first {:.6g},{:.6g} point pointtype 6 "
                                   "pointsize 1.2 linecolor '#000000' linewidth 2\n",
                                   shown->x, shown->y)
                             : "";
    }
  }
  std::ranges::stable_sort(points, {}, &point::x);
  const point* last = nullptr;
  for (const point& now : points) {
    if (last != nullptr && (is_share(p) ? now.y <= last->y : now.y >= last->y)) {
      continue;
    }
    if (last != nullptr) {
      for (const auto& [from, to] :
           {std::pair{*last, point{now.x, last->y}}, {point{now.x, last->y}, now}}) {
        script += fmt::format(
            "set arrow from first {:.6g},{:.6g} to first {:.6g},{:.6g} nohead back "
            "linecolor '#bbbbbb' linewidth 4\n",
            from.x, from.y, to.x, to.y);
      }
    }
    last = &now;
  }
  return script;
}

/// Nats per token that are a loss: full caches in 16 bits have less.
inline constexpr double least_shown = 5e-5;

/// Divergence and facts found, those that were measured, side by side. Bytes are on a logarithmic
/// axis in MiB, divergence too; what is without loss is not shown there. The frontier of all rows
/// is grey, full caches are marked. Empty: fewer than two policies, or nothing to show.
inline std::string bytes_picture(const std::vector<row>& rows, const palette& colours) {
  std::vector<line_panel> panels;
  for (const auto& [value, title] : {std::pair{&row::kl, "KL to the full cache, nats per token"},
                                     {&row::needle_after, "facts found, %"}}) {
    line_panel p{value, title, {}};
    p.point_of = [value = value, share = is_share(p)](const row& r) -> std::optional<point> {
      const auto& x = r.*value;
      return r.bytes && x && (share || x->mean >= least_shown)
                 ? std::optional(point{r.bytes->mean / (1 << 20), x->mean * (share ? 100 : 1)})
                 : std::nullopt;
    };
    if (std::ranges::any_of(rows, [&](const row& r) { return p.point_of(r).has_value(); })) {
      panels.push_back(p);
    }
  }
  std::vector<row> evicting;
  std::ranges::remove_copy_if(rows, std::back_inserter(evicting), keeps_all);
  auto policies = policies_of(evicting, panels);
  if (policies.size() < 2) {
    return {};
  }
  const std::size_t in_colour = colours.to_front(policies);
  std::set<double> mib;
  for (const row& r : rows) {
    mib.insert(mean_of(r.bytes) / (1 << 20));
  }
  mib.erase(0);  // of a row without bytes
  constexpr int width = 900, height = 520;
  std::string script =
      picture("bytes", width, height, "What is lost, by the bytes held: cache and state");
  script += fmt::format(
      "set logscale x\n"
      "set xrange [{:.4g}:{:.4g}]\n"
      "set xtics (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1000)\n"
      "set grid ytics linetype 1 linecolor '#e0e0e0' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'MiB' offset 0,0.2\n"
      "set tmargin at screen 0.72\n"
      "set bmargin at screen 0.26\n",
      0.87 * *mib.begin(), 1.15 * *mib.rbegin());
  script += styles(
      policies, colours, width, height,
      {{"linecolor '#bbbbbb' linewidth 4 pointtype 0", "least loss for its bytes"},
       {"linecolor '#555555' dashtype 3 pointtype 6 pointsize 1.2", "full cache, by storage"}});
  constexpr double row_apart = 14;  // pixels
  const double pitch = 0.93 / static_cast<double>(panels.size());
  for (std::size_t k = 0; k < panels.size(); ++k) {
    const auto values = coordinates(rows, std::span(panels).subspan(k, 1), &point::y);
    const std::string axis =
        is_share(panels[k]) ? "unset logscale y\nset yrange [-3:103]\nset ytics 25"
                            : fmt::format(
                                  "set logscale y\nset format y '%g'\nset yrange [{:.3g}:{:.3g}]\n"
                                  "set ytics (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, "
                                  "0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)",
                                  0.8 * *values.begin(), 1.25 * *values.rbegin());
    const double left = 0.07 + pitch * static_cast<double>(k), right = left + pitch - 0.06;
    const double least_ratio =
        std::pow(1.33 * *mib.rbegin() / *mib.begin(), row_apart / (width * (right - left)));
    script += plot_panel(evicting, panels[k], k, policies, in_colour, left, right,
                         fmt::format("{}\nset title '{}' offset 0,3.5\n{}{}", axis, panels[k].title,
                                     full_caches(rows, least_ratio), frontier(rows, panels[k]))) +
              "unset label\nunset arrow\n";
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
