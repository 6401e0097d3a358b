// SPDX-License-Identifier: MIT
/// What a refused CUDA call becomes.
#pragma once

#include <stdexcept>  // std::runtime_error
#include <string>

namespace kvmeld {

/// A CUDA call that failed: which, with what code, where.
class cuda_error : public std::runtime_error {
 public:
  cuda_error(const char* call, int code, const char* meaning, const char* file, int line)
      : std::runtime_error(std::string("kvmeld: ") + call + " failed with " + std::to_string(code) +
                           " (" + meaning + ") at " + file + ":" + std::to_string(line)),
        call_(call),
        code_(code),
        file_(file) {}

  const char* call() const { return call_; }
  int code() const { return code_; }
  const char* file() const { return file_; }

 private:
  const char* call_;
  int code_;
  const char* file_;
};

}  // namespace kvmeld
