// SPDX-License-Identifier: MIT
/// Pictures are gnuplot scripts with their data inside.
#pragma once

#include <fmt/format.h>
#include <sys/wait.h>  // WIFEXITED

#include <array>
#include <cstdlib>  // std::system
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace evaluate {

enum class drawing { done, no_gnuplot, failed };

/// What every picture begins with. `name` is the SVG file's; `title`: of one with several panels.
inline std::string picture(std::string_view name, int width, int height,
                           std::string_view title = {}) {
  return fmt::format(
             "set encoding utf8\n"
             "set terminal svg size {},{} font 'Helvetica,13' background '#ffffff'\n"
             "set output '{}.svg'\n"
             "set border linecolor '#555555'\n"
             "set tics textcolor '#333333' nomirror scale 0.5\n"
             "unset key\n",
             width, height, name) +
         (title.empty() ? std::string()
                        : fmt::format("set multiplot title '{{/:Bold {}}}' font ',15'\n", title));
}

/// Where a panel is on the screen.
inline std::string margins(double left, double right, double top, double bottom) {
  return fmt::format(
      "set lmargin at screen {:.4f}\n"
      "set rmargin at screen {:.4f}\n"
      "set tmargin at screen {:.4f}\n"
      "set bmargin at screen {:.4f}\n",
      left, right, top, bottom);
}

/// Panels of shares in percent, from grey to blue; their colour bar begins at height `y`.
inline std::string heat_map(double y, double height) {
  return fmt::format(
      "set palette defined (0 '#f4f4f4', 1 '#c6dbef', 2 '#6baed6', 3 '#2171b5', 4 '#08306b')\n"
      "set cbrange [0:100]\n"
      "set border 0\n"
      "set tics scale 0\n"
      "set colorbox user origin screen 0.925,{:.4f} size 0.018,{:.4f} noborder\n"
      "set cbtics ('0 %%' 0, '50 %%' 50, '100 %%' 100) offset -0.5\n",
      y, height);
}

/// A panel of such, of `x y percent` a line; the next ones have no colour bar.
inline std::string plot_heat(std::string_view name, std::string_view data,
                             std::string_view settings) {
  return fmt::format(
      "${0} << end\n{1}end\n{2}"
      "plot ${0} using 1:2:(0.485):(0.485):3 with boxxyerror fillstyle solid noborder "
      "fillcolor palette\n"
      "unset colorbox\n",
      name, data, settings);
}

/// The script is kept in `folder`/gnuplot and run in `folder`, so that `gnuplot gnuplot/error.gp`
/// there draws the picture again. `folder` is the process's own meanwhile.
inline drawing draw(const std::filesystem::path& folder, const std::string& name,
                    const std::string& script) {
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directories(folder / "gnuplot");
  std::filesystem::current_path(folder);
  const std::string file = "gnuplot/" + name + ".gp";
  std::ofstream(file) << script;
  const int status =
      std::system(("command -v gnuplot >/dev/null || exit 127; exec gnuplot " + file).c_str());
  std::filesystem::current_path(before);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  return code == 0 ? drawing::done : code == 127 ? drawing::no_gnuplot : drawing::failed;
}

/// Okabe and Ito's colours, distinguishable to the colour-blind; black is the full cache's.
inline std::string_view colour(std::size_t i) {
  static constexpr std::array<std::string_view, 7> palette = {
      "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7a00"};
  return palette[i % palette.size()];
}

/// A name and the line style that it stands for.
struct legend_entry {
  std::string name;
  std::size_t style;
};

/// Names and their lines, in as many rows as they take, the last at height `y` of the screen.
inline std::string legend(const std::vector<legend_entry>& names, double y, int picture_width,
                          int picture_height) {
  constexpr double letter = 7.4, sample = 48, line = 9, row_height = 22;  // pixels, about
  const auto width_of = [&](std::size_t i) {
    return sample + letter * static_cast<double>(names[i].name.size());
  };
  std::vector<std::size_t> begins = {0};  // of rows
  double width = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (width + width_of(i) > picture_width - 40) {
      begins.push_back(i);
      width = 0;
    }
    width += width_of(i);
  }
  begins.push_back(names.size());
  std::string script;
  for (std::size_t level = 0; level + 1 < begins.size(); ++level) {
    width = 0;
    for (std::size_t i = begins[level]; i < begins[level + 1]; ++i) {
      width += width_of(i);
    }
    double x = (picture_width - width) / 2 + 16;
    const double above = static_cast<double>(begins.size() - 2 - level) * row_height;
    for (std::size_t i = begins[level]; i < begins[level + 1]; ++i) {
      script += fmt::format(
          "set label {0} '{1}' noenhanced at screen {2:.4f},{3:.3f} left offset 1,0 "
          "point linestyle {4}\n"
          "set arrow {0} from screen {5:.4f},{3:.3f} to screen {6:.4f},{3:.3f} nohead "
          "linestyle {4}\n",
          100 + i, names[i].name, x / picture_width, y + above / picture_height, names[i].style,
          (x - line) / picture_width, (x + line) / picture_width);
      x += width_of(i);
    }
  }
  return script;
}

}  // namespace evaluate
