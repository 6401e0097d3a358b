// SPDX-License-Identifier: MIT
/// Pictures are gnuplot scripts with their data inside.
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <spawn.h>     // posix_spawnp
#include <sys/wait.h>  // waitpid

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

extern char** environ;

namespace evaluate {

enum class drawing { done, no_gnuplot, failed };

/// What every picture begins with. `name` is the SVG file's.
inline std::string picture(std::string_view name, int width, int height) {
  return fmt::format(
      "set encoding utf8\n"
      "set terminal svg size {},{} font 'Helvetica,13' background '#ffffff'\n"
      "set output '{}.svg'\n"
      "set border linecolor '#555555'\n"
      "set tics textcolor '#333333' nomirror scale 0.5\n"
      "unset key\n",
      width, height, name);
}

/// The script is kept in `folder`/gnuplot and run in `folder`, so that `gnuplot gnuplot/error.gp`
/// there draws the picture again.
inline drawing draw(const std::filesystem::path& folder, const std::string& name,
                    const std::string& script) {
  std::filesystem::create_directories(folder / "gnuplot");
  const std::string file = "gnuplot/" + name + ".gp";
  std::ofstream(folder / file) << script;
  std::array<char*, 3> arguments = {const_cast<char*>("gnuplot"), const_cast<char*>(file.c_str()),
                                    nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  pid_t child = 0;
  const int error = posix_spawnp(&child, "gnuplot", &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return error == ENOENT ? drawing::no_gnuplot : drawing::failed;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? drawing::done : drawing::failed;
}

/// Okabe and Ito's colours, distinguishable to the colour-blind; black is the full cache's.
inline std::string_view colour(std::size_t i) {
  static constexpr std::array<std::string_view, 7> palette = {
      "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7a00"};
  return palette[i % palette.size()];
}

/// What a legend says of lines that it does not name.
inline std::string others(std::size_t count) {
  return fmt::format("{} other{}", count, count == 1 ? "" : "s");
}

/// Names and their colours, in as many rows as they take, the last at height `y` of the screen:
/// line styles 1 and on.
inline std::string legend(const std::vector<std::string>& names, double y, int picture_width,
                          int picture_height) {
  constexpr double letter = 7.4, sample = 48, line = 9, row_height = 22;  // pixels, about
  const auto width_of = [&](std::size_t i) {
    return sample + letter * static_cast<double>(names[i].size());
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
          100 + i, names[i], x / picture_width, y + above / picture_height, i + 1,
          (x - line) / picture_width, (x + line) / picture_width);
      x += width_of(i);
    }
  }
  return script;
}

}  // namespace evaluate
