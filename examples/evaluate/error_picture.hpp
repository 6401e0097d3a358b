// SPDX-License-Identifier: MIT
/// Picture `error`: attention error against budget, after a prompt and while streaming. Picture
/// `stream`: how it grows, or does not, while more and more is decoded.
#pragma once

#include <limits>  // std::numeric_limits
#include <string>
#include <vector>

#include "evaluate/lines.hpp"
#include "evaluate/measure.hpp"

namespace evaluate {

/// Of policies that evict. Both axes are logarithmic, and both panels have the same: what is
/// without loss is not shown. Empty: nothing to show.
inline std::string error_picture(std::vector<row> rows, index_t prompt, const palette& colours) {
  std::erase_if(rows, keeps_all);
  std::vector<line_panel> panels;
  for (const auto& [value, title] :
       {std::pair{&row::attention_error, fmt::format("after a prompt of {} tokens", prompt)},
        {&row::stream_error, std::string("while decoding 10 times the budget")}}) {
    const line_panel p{value, title, [value = value](const row& r) -> std::optional<point> {
                         const auto& error = r.*value;
                         return mean_of(error) > 0 ? std::optional(point{1.0 * r.slots, error->mean,
                                                                         error->error.value_or(0)})
                                                   : std::nullopt;
                       }};
    if (std::ranges::any_of(rows, [&](const row& r) { return p.point_of(r).has_value(); })) {
      panels.push_back(p);
    }
  }
  if (panels.empty()) {
    return {};
  }
  auto policies = by_error(rows, policies_of(rows, panels), panels.front().value);
  const std::size_t in_colour = colours.to_front(policies);
  const auto budgets = coordinates(rows, panels, &point::x),
             errors = coordinates(rows, panels, &point::y);
  constexpr int width = 800, height = 420;
  std::string script = picture("error", width, height, "How far attention is off");
  script += fmt::format(
      "set logscale xy\n"
      "set xrange [{}:{}]\n"
      "set yrange [{:.3g}:{:.3g}]\n"
      "set xtics ({:g})\n"
      "set ytics ({})\n"
      "set grid ytics linetype 1 linecolor '#e0e0e0' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'budget, slots per head' offset 0,0.2\n"
      "set tmargin at screen 0.82\n"
      "set bmargin at screen 0.27\n",
      0.87 * *budgets.begin(), 1.15 * *budgets.rbegin(), 0.9 * *errors.begin(),
      1.1 * *errors.rbegin(), fmt::join(budgets, ", "),
      *errors.rbegin() < 8 * *errors.begin()
          ? "0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, "
            "0.6, 0.8, 1, 1.2, 1.5, 2"
          : "0.0001, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10");
  script += styles(policies, colours, width, height);
  double left = 0.1;
  for (const line_panel& p : panels) {
    const double right = panels.size() > 1 ? left + 0.412 : 0.97;
    const bool after = p.value == &row::attention_error;
    script +=
        plot_panel(rows, p, after ? 0 : 1, policies, in_colour, left, right,
                   fmt::format("set title '{}' offset 0,-0.4\n{}", p.title,
                               left < 0.2 ? "set ylabel 'relative error  ‖o′ − o‖ / ‖o‖' offset 1\n"
                                          : "unset ylabel\nunset label\nset format y ''\n"),
                   after);
    left = right + 0.045;
  }
  return script + "unset multiplot\n";
}

/// At the smallest budget, whose stream is the farthest within the model's context. Empty: nothing
/// to show.
inline std::string stream_picture(const std::vector<outcome>& outcomes, const palette& colours) {
  std::vector<const outcome*> lines;
  for (const outcome& x : outcomes) {
    if (mean_of(x.result.stream_error) > 0 &&
        (lines.empty() || x.result.slots <= lines.front()->result.slots)) {
      if (!lines.empty() && x.result.slots < lines.front()->result.slots) {
        lines.clear();
      }
      lines.push_back(&x);
    }
  }
  if (lines.empty()) {
    return {};
  }
  std::ranges::stable_sort(lines, {},
                           [](const outcome* x) { return x->result.stream_error->mean; });
  double least = std::numeric_limits<double>::infinity(), greatest = 0;
  for (const outcome* x : lines) {
    for (const double error : x->stream_error) {
      least = std::min(least, error), greatest = std::max(greatest, error);
    }
  }
  constexpr int width = 800, height = 420;
  std::string script = picture("stream", width, height);
  script += fmt::format(
      "set title '{{/:Bold How far attention is off while decoding}}, {} slots' font ',15'\n"
      "set logscale y\n"
      "set yrange [{:.3g}:{:.3g}]\n"
      "set ytics (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)\n"
      "set xrange [1:{}]\n"
      "set xtics 1\n"
      "set grid ytics linetype 1 linecolor '#e0e0e0' linewidth 1\n"
      "set border 3\n"
      "set xlabel 'tokens decoded, in budgets of {} slots' offset 0,0.2\n"
      "set ylabel 'relative error  ‖o′ − o‖ / ‖o‖' offset 1\n"
      "set bmargin at screen 0.27\n"
      "set lmargin at screen 0.1\n"
      "set rmargin at screen 0.97\n",
      lines.front()->result.slots, 0.9 * least, 1.1 * greatest, stream_budgets,
      lines.front()->result.slots);
  std::vector<std::string> policies;
  for (const outcome* x : lines) {
    policies.push_back(x->result.policy);
  }
  const std::size_t in_colour = colours.to_front(policies);
  std::vector<std::string> curves(policies.size());
  for (const outcome* x : lines) {
    std::string& curve =
        curves[as_size(std::ranges::find(policies, x->result.policy) - policies.begin())];
    for (std::size_t b = 0; b < x->stream_error.size(); ++b) {
      curve += fmt::format("{} {:.6g}\n", static_cast<double>(b) + 1.5, x->stream_error[b]);
    }
  }
  return script + plot_curves("line", curves, in_colour, styles(policies, colours, width, height));
}

}  // namespace evaluate
