// SPDX-License-Identifier: MIT
/// Files that the engine's tests write and refuse.
#pragma once

#include <catch2/catch.hpp>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "engine/error.hpp"
#include "support/paths.hpp"

namespace test {

namespace fs = std::filesystem;

inline fs::path engine_data(const std::string& name) {
  return fs::path(paths::data("engine")) / name;
}

/// A folder of its own, gone at the end of the test.
class temporary_folder {
 public:
  temporary_folder() {
    std::random_device draw;
    do {
      path_ = fs::temp_directory_path() / ("kvmeld-test-" + std::to_string(draw()));
    } while (!fs::create_directory(path_));
  }
  ~temporary_folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  temporary_folder(const temporary_folder&) = delete;
  temporary_folder& operator=(const temporary_folder&) = delete;

  const fs::path& path() const { return path_; }
  fs::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }
  void copy(const fs::path& folder) const {
    fs::copy(folder, path_, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  }

 private:
  fs::path path_;
};

/// A safetensors file's bytes; the length may lie.
inline std::string safetensors(const std::string& header, const std::string& data,
                               std::uint64_t length) {
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}
inline std::string safetensors(const std::string& header, const std::string& data) {
  return safetensors(header, data, header.size());
}

/// `work` throws format_error, and the message holds all of `words`: the file's name first of all.
template <class Work>
void expect_refusal(const std::string& file, std::initializer_list<std::string> words, Work work) {
  std::string message;
  try {
    work();
  } catch (const engine::format_error& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK_FALSE(message.empty());
  CHECK_THAT(message, Catch::Contains(file));
  for (const auto& word : words) {
    CHECK_THAT(message, Catch::Contains(word));
  }
}

}  // namespace test
