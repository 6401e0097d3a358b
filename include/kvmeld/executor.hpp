// SPDX-License-Identifier: MIT
/// Executors run the heads on the caller's threads, or on OpenMP's. kvmeld has none of its own.
#pragma once

#ifdef _OPENMP
#include <atomic>
#include <exception>  // std::exception_ptr
#endif
#include <concepts>

#include "kvmeld/config.hpp"
#include "kvmeld/error.hpp"

namespace kvmeld::inline v0 {

/// Calls `f(i, worker)` once for every `i = 0 … count − 1`, in any order, or at the same time;
/// `worker` is one of `0 … workers() − 1`, and no two calls at a time have the same one. Returns
/// when all are done. The call throws what `f` throws. An executor of no workers is refused
/// by every call that takes one.
template <class E>
concept executor = requires(const E& run, index_t count, void (*f)(index_t, index_t)) {
  { run.workers() } -> std::convertible_to<index_t>;
  run(count, f);
};

namespace detail {

/// How many workers an executor has. Refused: none.
template <executor E>
index_t workers_of(const char* call, const E& run) {
  const index_t workers = run.workers();
  expects(workers > 0, call, ": expected an executor of at least 1 worker, got ", workers);
  return workers;
}

}  // namespace detail

/// One after another, on the caller's thread.
struct serial {
  /// One: the caller's thread.
  static constexpr index_t workers() { return 1; }

  /// Calls `f(i, 0)` for every `i` below `count`, in order.
  template <class F>
  void operator()(index_t count, F f) const {
    for (index_t i = 0; i < count; ++i) {
      f(i, 0);
    }
  }
};

static_assert(executor<serial>);

#ifdef _OPENMP
/// An executor: `meld.step(heads, {q, k, v}, out, kvmeld::openmp{2})`. Of what heads throw, one
/// exception is thrown again when all heads are done.
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
#if KVMELD_EXCEPTIONS
        try {
          f(i, worker);
        } catch (...) {
          if (!failed.exchange(true)) {
            error = std::current_exception();
          }
        }
#else
        f(i, worker);
#endif
      }
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }
};

static_assert(executor<openmp>);
#endif  // _OPENMP

}  // namespace kvmeld::inline v0
