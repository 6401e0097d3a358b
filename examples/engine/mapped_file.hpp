// SPDX-License-Identifier: MIT
/// A file's bytes, mapped rather than read.
#pragma once

#include <fcntl.h>     // open
#include <sys/mman.h>  // mmap
#include <sys/stat.h>  // fstat
#include <unistd.h>    // close

#include <cerrno>
#include <cstddef>
#include <cstring>  // std::strerror
#include <filesystem>
#include <span>
#include <utility>  // std::exchange

#include "engine/error.hpp"

namespace engine {

/// Read-only. The file must not be shortened while it is mapped.
class mapped_file {
 public:
  mapped_file() = default;  ///< no bytes
  explicit mapped_file(const std::filesystem::path& file) {
    const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
      throw format_error(file, "expected a readable file: ", std::strerror(errno));
    }
    struct stat status = {};
    const bool regular = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    void* data = nullptr;
    size_ = regular ? static_cast<std::size_t>(status.st_size) : 0;
    if (size_ > 0) {  // mmap refuses to map nothing
      data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    }
    const int error = errno;
    close(descriptor);
    if (!regular || data == MAP_FAILED) {
      throw format_error(file, "expected a file to map: ",
                         regular ? std::strerror(error) : "this is no regular file");
    }
    data_ = static_cast<const std::byte*>(data);
  }
  ~mapped_file() {
    if (data_ != nullptr) {
      munmap(const_cast<std::byte*>(data_), size_);
    }
  }
  mapped_file(mapped_file&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  mapped_file& operator=(mapped_file&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  mapped_file(const mapped_file&) = delete;
  mapped_file& operator=(const mapped_file&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace engine
