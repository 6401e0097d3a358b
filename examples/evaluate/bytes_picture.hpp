// SPDX-License-Identifier: MIT
/// Picture `bytes`: what compression costs against the bytes that it holds, state included.
#pragma once

#include <algorithm>  // std::ranges::any_of, stable_sort
#include <array>
#include <functional>  // std::greater
#include <set>
#include <string>
#include <vector>

#include "evaluate/error_picture.hpp"

namespace evaluate {

namespace detail {

struct bytes_panel {
  std::optional<double> row::*value;
  const char* title;
  bool share;  ///< of the cases, from 0 to 1; else on a logarithmic axis
};

/// The policies in the order of their lines: the best of each panel, the next best of each, and so
/// on.
inline std::vector<std::string> by_panels(const std::vector<row>& rows,
                                          const std::vector<std::string>& policies,
                                          const std::vector<bytes_panel>& panels) {
  std::vector<std::vector<std::string>> ranked;
  for (const bytes_panel& p : panels) {
    ranked.push_back(by_error(rows, policies, p.value));
    if (p.share) {
      std::ranges::stable_sort(ranked.back(), std::greater{}, [&](const std::string& policy) {
        double sum = 0;
        for (const row& r : rows) {
          sum += r.policy == policy ? (r.*p.value).value_or(0) : 0;
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

}  // namespace detail

/// Attention error, divergence and facts found, those that were measured, side by side. Bytes are
/// on a logarithmic axis in MiB, error and divergence too; what is without loss is not shown. The
/// best of each are in colour. Empty: fewer than two policies, or nothing to show.
inline std::string bytes_picture(const std::vector<row>& rows) {
  using panel = detail::bytes_panel;
  constexpr std::array all = {panel{&row::attention_error, "attention error", false},
                              panel{&row::kl, "KL to the full cache, nats per token", false},
                              panel{&row::needle_after, "facts found, %", true}};
  const auto shows = [](const row& r, const panel& p) {
    return r.bytes && r.attention_error.value_or(1) > 0 && r.kl.value_or(1) > 0 &&
           (p.share ? (r.*p.value).has_value() : (r.*p.value).value_or(0) > 0);
  };
  std::vector<panel> panels;
  std::vector<std::string> policies;
  std::set<double> mib;
  for (const panel& p : all) {
    if (std::ranges::any_of(rows, [&](const row& r) { return shows(r, p); })) {
      panels.push_back(p);
    }
    for (const row& r : rows) {
      if (shows(r, p)) {
        mib.insert(*r.bytes / (1 << 20));
        if (std::ranges::find(policies, r.policy) == policies.end()) {
          policies.push_back(r.policy);
        }
      }
    }
  }
  if (policies.size() < 2) {
    return {};
  }
  policies = detail::by_panels(rows, policies, panels);
  constexpr int width = 900, height = 420;
  std::string script = picture("bytes", width, height);
  script += fmt::format(
      "set multiplot title '{{/:Bold What is lost, by the bytes held: cache and state}}' font "
      "',15'\n"
      "set logscale x\n"
      "set xrange [{:.4g}:{:.4g}]\n"
      "set xtics (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1000)\n"
      "set grid ytics linetype 1 linecolor '#e0e0e0' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'MiB' offset 0,0.2\n"
      "set tmargin at screen 0.82\n"
      "set bmargin at screen 0.3\n",
      0.87 * *mib.begin(), 1.15 * *mib.rbegin());
  script += detail::styles(policies, width, height);
  const double pitch = 0.93 / static_cast<double>(panels.size());
  for (std::size_t k = 0; k < panels.size(); ++k) {
    std::string plots;
    std::set<double> values;
    for (std::size_t i = policies.size(); i-- > 0;) {  // the best on top
      std::string data;
      for (const row& r : rows) {
        if (r.policy == policies[i] && shows(r, panels[k])) {
          values.insert(*(r.*panels[k].value));
          data += fmt::format("{:.6g} {:.6g}\n", *r.bytes / (1 << 20),
                              *(r.*panels[k].value) * (panels[k].share ? 100 : 1));
        }
      }
      if (!data.empty()) {
        script += fmt::format("$panel{}_{} << end\n{}end\n", k, i, data);
        plots += fmt::format("{}$panel{}_{} with linespoints linestyle {}",
                             plots.empty() ? "" : ", ", k, i, std::min(i, detail::coloured) + 1);
      }
    }
    const double left = 0.06 + pitch * static_cast<double>(k);
    script += fmt::format(
        "set lmargin at screen {:.3f}\n"
        "set rmargin at screen {:.3f}\n"
        "{}\n"
        "set title '{}' offset 0,-0.4\n"
        "plot {}\n",
        left, left + pitch - 0.06,
        panels[k].share
            ? "unset logscale y\nset yrange [-3:103]\nset ytics 25"
            : fmt::format(
                  "set logscale y\nset yrange [{:.3g}:{:.3g}]\n"
                  "set ytics (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)",
                  0.8 * *values.begin(), 1.25 * *values.rbegin()),
        panels[k].title, plots);
    script += "unset label\n";
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
