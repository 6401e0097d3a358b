// SPDX-License-Identifier: MIT
/// Picture `stream`: how the error grows, or does not, while more and more is decoded.
#pragma once

#include <limits>  // std::numeric_limits
#include <string>
#include <vector>

#include "evaluate/error_picture.hpp"
#include "evaluate/measure.hpp"

namespace evaluate {

/// At the smallest budget, whose stream is the farthest within the model's context. Coloured like
/// picture `error`: those of least error. Empty: nothing to show.
inline std::string stream_picture(const std::vector<outcome>& outcomes) {
  std::vector<const outcome*> lines;
  for (const outcome& x : outcomes) {
    if (x.result.stream_error.value_or(0) > 0 &&
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
  std::ranges::stable_sort(lines, {}, [](const outcome* x) { return *x->result.stream_error; });
  double least = std::numeric_limits<double>::infinity(), greatest = 0;
  for (const outcome* x : lines) {
    for (const double error : x->stream_error) {
      least = std::min(least, error), greatest = std::max(greatest, error);
    }
  }
  constexpr std::size_t most = 7;
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
  std::vector<std::string> named;
  std::string plots;
  for (std::size_t i = lines.size(); i-- > 0;) {  // the best on top
    script += fmt::format("$line{} << end\n", i);
    for (std::size_t b = 0; b < lines[i]->stream_error.size(); ++b) {
      script += fmt::format("{} {:.6g}\n", static_cast<double>(b) + 1.5, lines[i]->stream_error[b]);
    }
    script += "end\n";
    plots += fmt::format("{}$line{} with linespoints linestyle {}", plots.empty() ? "" : ", ", i,
                         std::min(i, most) + 1);
  }
  for (std::size_t i = 0; i < std::min(lines.size(), most); ++i) {
    script +=
        fmt::format("set style line {} linecolor '{}' linewidth 2.5 pointtype {} pointsize 0.8\n",
                    i + 1, colour(i), std::array{7, 5, 9, 11, 13, 15, 3}[i]);
    named.push_back(lines[i]->result.policy);
  }
  script +=
      fmt::format("set style line {} linecolor '#cccccc' linewidth 1.2 pointtype 0\n", most + 1);
  if (lines.size() > most) {
    named.push_back(others(lines.size() - most));
  }
  return script + legend(named, 0.045, width, height) + "plot " + plots + "\n";
}

}  // namespace evaluate
