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
  const int error =
      posix_spawnp(&child, "gnuplot", &actions, nullptr, arguments.data(), environ);
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

/// Names as gnuplot's enhanced text shows them: an underscore would lower the next letter.
inline std::string plain(std::string_view name) {
  std::string text;
  for (const char c : name) {
    text += c == '_' ? std::string("\\\\_") : std::string(1, c);
  }
  return text;
}

}  // namespace evaluate
