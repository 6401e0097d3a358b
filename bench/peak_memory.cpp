// SPDX-License-Identifier: MIT
// Counts all memory: Eigen's aligned blocks come from malloc, which the linker sends here
// (--wrap=malloc,--wrap=free), everything else from new.
#include "peak_memory.hpp"

#include <malloc.h>  // malloc_usable_size

#include <cstdlib>
#include <new>

std::size_t bench::allocated::now = 0, bench::allocated::most = 0;

extern "C" {

void* __real_malloc(std::size_t bytes);  // NOLINT: the linker's names
void __real_free(void* p);               // NOLINT

void* __wrap_malloc(std::size_t bytes) {
  using bench::allocated;
  void* p = __real_malloc(bytes);
  allocated::now += malloc_usable_size(p);
  allocated::most = allocated::most < allocated::now ? allocated::now : allocated::most;
  return p;
}

void __wrap_free(void* p) {
  // What a library allocated for itself and left to us to free was not counted.
  const std::size_t bytes = malloc_usable_size(p);
  bench::allocated::now -= bytes < bench::allocated::now ? bytes : bench::allocated::now;
  __real_free(p);
}
}

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) {
    return p;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
