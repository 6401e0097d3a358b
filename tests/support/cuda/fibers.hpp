// SPDX-License-Identifier: MIT
/// Fibers for the CUDA emulator: one a thread of a block, on Boost.Context's own switches,
/// announced to AddressSanitizer where it runs.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstddef>
#include <deque>

#if defined(__SANITIZE_ADDRESS__)
#define KVMELD_FIBERS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVMELD_FIBERS_ASAN 1
#endif
#endif
#ifdef KVMELD_FIBERS_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvmeld::cuda::emulator {

/// One fiber, with a stack of its own behind a guard page. What it runs never returns: it hands
/// over with `suspend` for the last time and is started anew.
class fiber {
 public:
  using body = void (*)(void*);

  /// All stacks end with a page: those of a warp begin in it at places of their own, or they would
  /// share few sets of the processor's cache.
  explicit fiber(std::size_t number) : stack_(allocator().allocate()), apart_(number % 32 * 128) {}
  fiber(const fiber&) = delete;
  fiber& operator=(const fiber&) = delete;
  ~fiber() { allocator().deallocate(stack_); }

  /// Runs `run(argument)` at the next `resume`, from its beginning; an earlier run is forgotten.
  void start(body run, void* argument) {
#ifdef KVMELD_FIBERS_ASAN
    // What returned has cleaned up behind itself, but for the frame of `entry`.
    const std::size_t used = ended_ ? 4096 + apart_ : stack_.size;
    ASAN_UNPOISON_MEMORY_REGION(static_cast<char*>(stack_.sp) - used, used);
    ended_ = false;
#endif
    run_ = run, argument_ = argument;
    context_ = boost::context::detail::make_fcontext(static_cast<char*>(stack_.sp) - apart_,
                                                     stack_.size - apart_, &entry);
  }

  /// Goes on with the fiber until it suspends.
  void resume() {
#ifdef KVMELD_FIBERS_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, bottom(), stack_.size);
#endif
    context_ = boost::context::detail::jump_fcontext(context_, this).fctx;
#ifdef KVMELD_FIBERS_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  /// From within: back to the caller of resume. `last`: never to come back.
  void suspend([[maybe_unused]] bool last = false) {
#ifdef KVMELD_FIBERS_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, outer_bottom_, outer_size_);
#endif
    outer_ = boost::context::detail::jump_fcontext(outer_, nullptr).fctx;
#ifdef KVMELD_FIBERS_ASAN
    __sanitizer_finish_switch_fiber(fake, &outer_bottom_, &outer_size_);
#endif
  }

 private:
  static boost::context::protected_fixedsize_stack allocator() {
#ifdef KVMELD_FIBERS_ASAN
    return boost::context::protected_fixedsize_stack(256 * 1024);
#else
    return boost::context::protected_fixedsize_stack(64 * 1024);
#endif
  }

  static void entry(boost::context::detail::transfer_t from) {
    auto& self = *static_cast<fiber*>(from.data);
    self.outer_ = from.fctx;
#ifdef KVMELD_FIBERS_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &self.outer_bottom_, &self.outer_size_);
#endif
    self.run_(self.argument_);
#ifdef KVMELD_FIBERS_ASAN
    self.ended_ = true;
#endif
    self.suspend(true);
  }

  void* bottom() const { return static_cast<char*>(stack_.sp) - stack_.size; }

  boost::context::stack_context stack_;
  std::size_t apart_;
  boost::context::detail::fcontext_t context_ = nullptr, outer_ = nullptr;
  body run_ = nullptr;
  void* argument_ = nullptr;
#ifdef KVMELD_FIBERS_ASAN
  const void* outer_bottom_ = nullptr;
  std::size_t outer_size_ = 0;
  bool ended_ = false;  // the last run, so that no frame of it is left
#endif
};

/// At least `count` fibers, kept from block to block and launch to launch.
inline std::deque<fiber>& fibers(std::size_t count) {
  thread_local std::deque<fiber> pool;
  while (pool.size() < count) {
    pool.emplace_back(pool.size());
  }
  return pool;
}

}  // namespace kvmeld::cuda::emulator
