// SPDX-License-Identifier: MIT
/// The caller's mistakes.
#pragma once

#include <stdexcept>
#include <string>

namespace evaluate {

/// The caller's mistake, as one line: nothing was run.
class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

inline void require(bool ok, const std::string& message) {
  if (!ok) {
    throw usage_error(message);
  }
}

}  // namespace detail
}  // namespace evaluate
