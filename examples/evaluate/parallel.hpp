// SPDX-License-Identifier: MIT
/// Independent pieces of work on several threads, and Ctrl-C.
#pragma once

#include <algorithm>  // std::min
#include <atomic>
#include <csignal>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/matrix.hpp"
#include "evaluate/progress.hpp"

namespace evaluate {

using engine::as_size;
using engine::index_t;

/// Set by Ctrl-C; work in hand is finished, nothing new is begun.
inline std::atomic<bool> interrupted = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler writes it

/// Thrown when Ctrl-C cut work short.
struct interruption {};

/// The first Ctrl-C asks for an end, the second one ends.
inline void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

/// Threads for loops whose pieces do not depend on one another; the bar moves with every piece.
class workers {
 public:
  workers(index_t threads, progress& bar) : threads_(threads), bar_(bar) {}

  /// `f(0) .. f(n − 1)`, in order; each is called once, in any order.
  template <class F>
  auto map(index_t n, F f) const {
    return map_in_steps(n, [&](index_t i, const auto& done) {
      auto result = f(i);
      done(1);
      return result;
    });
  }
  /// The same of `f(i, done)`, of which `done(share)` says what share of its piece is done besides.
  template <class F>
  auto map_in_steps(index_t n, F f) const {
    const auto done = [this, n](double share) { bar_.add(share / n); };
    std::vector<decltype(f(index_t{}, done))> results(as_size(n));
    std::atomic<index_t> next = 0;
    std::exception_ptr error;
    std::mutex guard;
    const auto work = [&] {
      for (index_t i = 0; !interrupted && (i = next++) < n;) {
        try {
          results[as_size(i)] = f(i, done);
        } catch (...) {
          const std::lock_guard lock(guard);
          error = std::current_exception();
          next = n;
        }
      }
    };
    {
      std::vector<std::jthread> helpers;
      for (index_t t = 1; t < std::min(threads_, n); ++t) {
        helpers.emplace_back(work);
      }
      work();
    }
    if (error) {
      std::rethrow_exception(error);
    }
    if (interrupted) {
      throw interruption();
    }
    return results;
  }

 private:
  index_t threads_;
  progress& bar_;
};

}  // namespace evaluate
