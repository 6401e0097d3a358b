// A file that is in memory alone, for readers that take a path.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "bytes.hpp"

namespace fuzz {

class memory_file {
 public:
  memory_file() : handle_(memfd_create("fuzz", 0)) { must(handle_ >= 0, "a file in memory"); }

  std::filesystem::path holding(const std::uint8_t* data, std::size_t size) const {
    must(ftruncate(handle_, 0) == 0, "truncate");
    must(pwrite(handle_, data, size, 0) == static_cast<ssize_t>(size), "write");
    return "/proc/self/fd/" + std::to_string(handle_);
  }

 private:
  int handle_;
};

}  // namespace fuzz
