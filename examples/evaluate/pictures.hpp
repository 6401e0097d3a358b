// SPDX-License-Identifier: MIT
/// All pictures of what was measured.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "evaluate/bytes_picture.hpp"
#include "evaluate/error_picture.hpp"
#include "evaluate/heads_picture.hpp"
#include "evaluate/needle_picture.hpp"
#include "evaluate/retention_picture.hpp"
#include "evaluate/stream_picture.hpp"

namespace evaluate {

/// Draws what there is to show, and says where, or why not.
inline void draw_pictures(const options& o, const plan& todo, const engine::config& shape,
                          const dataset& m, const std::vector<outcome>& outcomes,
                          std::ostream& out) {
  std::vector<row> rows;
  for (const outcome& x : outcomes) {
    rows.push_back(x.result);
  }
  for (const auto& [name, script] :
       {std::pair<std::string, std::string>{"error", error_picture(rows, o.prompt)},
        {"bytes", bytes_picture(rows)},
        {"needle", needle_picture(outcomes)},
        {"stream", stream_picture(outcomes)},
        {"heads", heads_picture(mean_head_stats(m.looking), shape.heads)},
        {"retention", retention_picture(todo, shape, m)}}) {
    if (script.empty()) {
      continue;
    }
    switch (draw(o.plots, name, script)) {
      case drawing::done:
        out << fmt::format("{:<9}  {}\n", name, (o.plots / (name + ".svg")).string());
        break;
      case drawing::failed:
        out << fmt::format("{:<9}  gnuplot could not draw {}\n", name,
                           (o.plots / "gnuplot" / (name + ".gp")).string());
        break;
      case drawing::no_gnuplot:
        out << "no pictures: gnuplot is not installed (Debian: apt install gnuplot-nox)\n";
        return;
    }
  }
}

}  // namespace evaluate
