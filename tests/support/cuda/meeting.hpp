// SPDX-License-Identifier: MIT
/// What threads of the CUDA emulator bring to a call in which they meet, and what it says of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>

#include "kvmeld/config.hpp"

namespace kvmeld::cuda::emulator {

/// What no GPU would have said: a barrier not met, a mask not agreed on, a race, an overrun.
class error : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Where in a kernel's source a call stands.
struct site {
  const char* file;
  int line;
};

inline std::string text(site at) {
  const std::string file = at.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(at.line);
}

/// A call in which the lanes of a warp meet: all must make the same.
struct meeting {
  const char* name = "";
  index_t detail = 0;  ///< what they must agree on: a distance, a width
  unsigned mask = 0;
  site at = {"", 0};

  bool operator==(const meeting& o) const {
    return mask == o.mask && detail == o.detail && at.line == o.at.line &&
           (name == o.name || std::strcmp(name, o.name) == 0);
  }
};

/// The values that lanes brought to a meeting.
struct exchange {
  static constexpr std::size_t most = 64;
  std::array<std::array<unsigned char, most>, 32> value;
  bool reduced = false;

  template <class T>
  T get(index_t lane) const {
    T x;
    std::memcpy(&x, value[static_cast<std::size_t>(lane)].data(), sizeof(T));
    return x;
  }
  template <class T>
  void set(index_t lane, const T& x) {
    std::memcpy(value[static_cast<std::size_t>(lane)].data(), &x, sizeof(T));
  }
};

/// A lane reads its exchange before it comes to the next, so 32 of them never collide.
using exchanges = std::array<exchange, 33>;

/// At least `count` warps', kept from block to block and launch to launch.
inline std::deque<exchanges>& exchanges_of_warps(std::size_t count) {
  thread_local std::deque<exchanges> kept;
  while (kept.size() < count) {
    kept.emplace_back();
  }
  return kept;
}

}  // namespace kvmeld::cuda::emulator
