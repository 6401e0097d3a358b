// SPDX-License-Identifier: MIT
/// What the engine throws when a model's files are not what they should be.
#pragma once

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
      : std::runtime_error(message(file, parts...)) {}

 private:
  template <class... Parts>
  static std::string message(const std::filesystem::path& file, const Parts&... parts) {
    std::ostringstream text;
    text << file.string() << ": ";
    (text << ... << parts);
    return text.str();
  }
};

/// The bytes of a (small) file.
inline std::string read_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in || std::filesystem::is_directory(file)) {  // a folder opens, and reads as empty
    throw format_error(file, "expected a readable file");
  }
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace engine
