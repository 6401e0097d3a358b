// SPDX-License-Identifier: MIT
/// What the engine throws when a model's files are not what they should be.
#pragma once

#include <cerrno>
#include <cstring>  // std::strerror
#include <filesystem>
#include <fstream>
#include <iterator>  // std::istreambuf_iterator
#include <sstream>
#include <stdexcept>
#include <string>

namespace engine {

/// A file that is missing, malformed or of another kind than this engine reads. Names the file.
class format_error : public std::runtime_error {
 public:
  template <class... Parts>
  explicit format_error(const std::filesystem::path& file, const Parts&... parts)
      : std::runtime_error(
            ((std::ostringstream() << file.string() << ": ") << ... << parts).str()) {}
};

/// A regular file, to be read in parts.
inline std::ifstream open_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) {
    throw format_error(file, "expected a readable file: ", std::strerror(errno));
  }
  if (!std::filesystem::is_regular_file(file)) {  // a folder opens, and reads as empty
    throw format_error(file, "expected a readable file: this is no regular file");
  }
  return in;
}

/// The bytes of a (small) file.
inline std::string read_file(const std::filesystem::path& file) {
  auto in = open_file(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace engine
