// SPDX-License-Identifier: MIT
/// Heads on OpenMP's threads. There is nothing here where OpenMP is off (`-fopenmp` is on).
#pragma once

#ifdef _OPENMP

#include <atomic>
#include <exception>  // std::exception_ptr

#include "kvmeld/executor.hpp"

namespace kvmeld::inline v0 {

/// An executor: `meld.step(heads, {q, k, v}, out, kvmeld::openmp{2})`. Of what heads throw, one
/// comes out when all heads are done.
struct openmp {
  index_t threads = 1;

  index_t workers() const { return threads; }

  template <class F>
  void operator()(index_t count, F f) const {
    std::atomic<index_t> next = 0;
    std::atomic<bool> failed = false;
    std::exception_ptr error;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (index_t worker = 0; worker < threads; ++worker) {
      for (index_t i; (i = next++) < count;) {
        try {
          f(i, worker);
        } catch (...) {
          if (!failed.exchange(true)) {
            error = std::current_exception();
          }
        }
      }
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }
};

static_assert(executor<openmp>);

}  // namespace kvmeld::inline v0

#endif  // _OPENMP
