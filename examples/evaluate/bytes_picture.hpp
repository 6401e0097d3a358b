// SPDX-License-Identifier: MIT
/// Picture `bytes`: what compression costs against the bytes that it holds, state included.
#pragma once

#include <algorithm>   // std::ranges::any_of, remove_copy_if, stable_sort
#include <functional>  // std::greater
#include <iterator>    // std::back_inserter
#include <set>
#include <string>
#include <vector>

#include "evaluate/lines.hpp"

namespace evaluate {

/// Facts are a share of the cases, from 0 to 1; other figures are on a logarithmic axis.
inline bool is_share(const line_panel& p) { return p.value == &row::needle_after; }

/// The policies in the order of their lines: the best of each panel, the next best of each, and so
/// on.
inline std::vector<std::string> by_panels(const std::vector<row>& rows,
                                          const std::vector<line_panel>& panels) {
  const auto policies = policies_of(rows, panels);
  std::vector<std::vector<std::string>> ranked;
  for (const line_panel& p : panels) {
    ranked.push_back(by_error(rows, policies, p.value));
    if (is_share(p)) {
      std::ranges::stable_sort(ranked.back(), std::greater{}, [&](const std::string& policy) {
        double sum = 0;
        for (const row& r : rows) {
          sum += r.policy == policy ? mean_of(r.*p.value) : 0;
        }
        return sum;
      });
    }
  }
  std::vector<std::string> order;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    for (const auto& of_panel : ranked) {
      if (std::ranges::find(order, of_panel[i]) == order.end()) {
        order.push_back(of_panel[i]);
      }
    }
  }
  return order;
}

inline bool keeps_all(const row& r) { return r.policy.starts_with("full_cache"); }

/// Steps through the rows that no other beats with as few bytes, under all else, and full caches by
/// name, each at its bytes.
inline std::string frontier(const std::vector<row>& rows, const line_panel& p) {
  std::vector<point> points;
  std::string script;
  for (const row& r : rows) {
    const auto shown = p.point_of(r);
    if (shown) {
      points.push_back(*shown);
    }
    if (keeps_all(r) && r.bytes) {
      const std::string name = r.policy.substr(std::min(r.policy.find('/'), r.policy.size()));
      const double mib = r.bytes->mean / (1 << 20);
      script += fmt::format(
          "set arrow from first {0:.6g},graph 0 to first {0:.6g},graph 1 nohead back "
          "linecolor '#999999' dashtype 3\n"
          "set label '{1}' noenhanced at first {0:.6g},graph {2} rotate by 90 "
          "offset 0.6,0 font ',11'\n",
          mib, name.empty() ? "full cache" : "full " + name.substr(1),
          is_share(p) ? "0.02 left" : "0.98 right");  // away from the good rows
      script += shown ? fmt::format(
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
/// axis in MiB, divergence too; what is without loss is not shown there. The best of each are in
/// colour, the frontier of all rows is grey, full caches are marked. Empty: fewer than two
/// policies, or nothing to show.
inline std::string bytes_picture(const std::vector<row>& rows) {
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
  const auto policies = by_panels(evicting, panels);
  if (policies.size() < 2) {
    return {};
  }
  std::set<double> mib;
  for (const row& r : rows) {
    mib.insert(mean_of(r.bytes) / (1 << 20));
  }
  mib.erase(0);  // of a row without bytes
  constexpr int width = 900, height = 420;
  std::string script =
      picture("bytes", width, height, "What is lost, by the bytes held: cache and state");
  script += fmt::format(
      "set logscale x\n"
      "set xrange [{:.4g}:{:.4g}]\n"
      "set xtics (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1000)\n"
      "set grid ytics linetype 1 linecolor '#e0e0e0' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'MiB' offset 0,0.2\n"
      "set tmargin at screen 0.82\n"
      "set bmargin at screen 0.3\n",
      0.87 * *mib.begin(), 1.15 * *mib.rbegin());
  script += styles(policies, width, height);
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
    const double left = 0.07 + pitch * static_cast<double>(k);
    script += plot_panel(evicting, panels[k], k, policies, left, left + pitch - 0.06,
                         fmt::format("{}\nset title '{}' offset 0,-0.4\n{}", axis, panels[k].title,
                                     frontier(rows, panels[k]))) +
              "unset label\nunset arrow\n";
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
