// SPDX-License-Identifier: MIT
/// The functions of the program's own libllama behind those that are interposed.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>  // std::abort

namespace kvmeld::llama::run {

inline void* next_of(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    std::fprintf(stderr, "kvmeld-run: expected %s in the program's libllama, got none\n", name);
    std::abort();
  }
  return found;
}

/// The libllama's own function `f`.
#define KVMELD_NEXT(f)                                                                           \
  ([] {                                                                                          \
    static const auto found = reinterpret_cast<decltype(&::f)>(kvmeld::llama::run::next_of(#f)); \
    return found;                                                                                \
  }())

/// While one lives, the thread's calls go to libllama: the adapter's, and what libllama calls
/// itself.
class within {
 public:
  within() { ++depth(); }
  ~within() { --depth(); }
  within(const within&) = delete;
  within& operator=(const within&) = delete;
  static bool any() { return depth() > 0; }

 private:
  static int& depth() {
    thread_local int d = 0;
    return d;
  }
};

}  // namespace kvmeld::llama::run
