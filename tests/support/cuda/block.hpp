// SPDX-License-Identifier: MIT
/// One block of the CUDA emulator: its threads as fibers, where they wait, and what they exchange.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/chance.hpp"
#include "cuda/copies.hpp"
#include "cuda/fibers.hpp"
#include "cuda/meeting.hpp"
#include "cuda/traffic.hpp"
#include "kvmeld/config.hpp"

namespace kvmeld::cuda::emulator {

class block {
 public:
  using body = std::function<void()>;

  /// `before_ends`: what the end of the launch before brings, where that may still run.
  block(index_t threads, std::uint64_t seed, body run, body before_ends = {})
      : threads_(static_cast<std::size_t>(threads)),
        warps_(static_cast<std::size_t>(threads) / 32),
        random_{seed},
        run_(std::move(run)),
        before_ends_(std::move(before_ends)) {}

  /// Runs all threads to their end, or throws what is wrong.
  void run() {
    auto& pool = fibers(threads_.size());
    block* const outer = current;
    current = this;
    for (std::size_t w = 0; w < warps_.size(); ++w) {
      warps_[w].kept = &exchanges_of_warps(warps_.size())[w];
    }
    for (std::size_t t = 0; t < threads_.size(); ++t) {
      threads_[t].fiber = &pool[t];
      pool[t].start(&enter, this);
      make_ready(t);
    }
    std::size_t left = threads_.size();
    while (left > 0 && !failure_) {
      if (ready_.empty()) {
        if (!for_launch_.empty()) {
          end_launch_before();
          continue;
        }
        if (waiting_ == threads_.size()) {
          release_barrier();
          continue;
        }
        failure_ = std::make_exception_ptr(error(stuck()));
        break;
      }
      left -= run_warp();
    }
    settle_warps();
    if (!failure_) {
      end_launch_before();  // where no thread waited
    }
    current = outer;
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

  index_t thread() const { return static_cast<index_t>(thread_); }
  index_t barriers() const { return barriers_; }             ///< of the block so far
  index_t epoch() const { return threads_[thread_].epoch; }  ///< the warp's barriers so far

  /// Until the launch before has ended: when no other thread can go on.
  void wait_for_launch() {
    if (before_ends_) {
      threads_[thread_].state = state::launch;
      for_launch_.push_back(thread_);
      threads_[thread_].fiber->suspend();
    }
  }

  void sync_block(site at) {
    record& me = threads_[thread_];
    me.state = state::block, me.call = {"sync_block", 0, 0, at};
    ++waiting_;
    warps_[thread_ / 32].away |= 1U << thread_ % 32;
    me.fiber->suspend();
  }

  /// Waits until all lanes of `call.mask` have come; their values stay until the caller's next
  /// call.
  exchange& meet(const meeting& call, const void* value, std::size_t size, bool orders = false) {
    const std::size_t lane = thread_ % 32, first = thread_ - lane;
    warp_record& w = warps_[thread_ / 32];
    record& me = threads_[thread_];
    if ((call.mask >> lane & 1U) == 0) {
      fail("the mask leaves out the lane that calls", call);
    }
    me.state = state::warp, me.call = call, me.exchanged = nullptr;
    std::memcpy(me.value.data(), value, size);
    w.ready &= ~(1U << lane);
    if ((call.mask & w.away) != 0) {
      fail_without(first, call);
    }
    if ((call.mask & w.ready) == 0) {  // all have come
      expect_same(first, call);
      resolve(first, call.mask, size, orders);
    } else {
      me.fiber->suspend();
    }
    return *me.exchanged;
  }

  [[noreturn]] void fail(const std::string& what, const meeting& call) const {
    throw error(name() + " calls " + text(call) + ": " + what);
  }
  [[noreturn]] void fail(const std::string& what) const { throw error(name() + ": " + what); }

  /// Of the thread that runs.
  emulator::copies& copies() { return threads_[thread_].copies; }

  static thread_local block* current;

 private:
  enum class state { ready, block, warp, launch, left };

  void make_ready(std::size_t t) {
    threads_[t].state = state::ready;
    warp_record& w = warps_[t / 32];
    if (w.to_run == 0) {
      ready_.push_back(t / 32);
    }
    w.to_run |= 1U << t % 32;
  }

  /// Runs the ready lanes of a warp by chance, in an order by chance, each until it waits: their
  /// stacks stay in the cache from one meeting to the next. Returns how many have left.
  std::size_t run_warp() {
    std::swap(ready_[random_.below(static_cast<std::uint32_t>(ready_.size()))], ready_.back());
    const std::size_t first = 32 * ready_.back();
    const unsigned lanes = std::exchange(warps_[ready_.back()].to_run, 0U);
    ready_.pop_back();
    std::uint32_t lane = random_.below(32);
    const std::uint32_t stride = 2 * random_.below(16) + 1;
    std::size_t left = 0;
    for (int n = 0; n < 32 && !failure_; ++n, lane = (lane + stride) % 32) {
      if ((lanes >> lane & 1U) != 0) {
        thread_ = first + lane;
        threads_[thread_].fiber->resume();
        left += threads_[thread_].state == state::left ? 1U : 0U;
      }
    }
    return left;
  }

  struct record {
    emulator::fiber* fiber = nullptr;
    emulator::block::state state = state::ready;
    meeting call;
    std::array<unsigned char, exchange::most> value;
    exchange* exchanged = nullptr;
    index_t epoch = 0;
    emulator::copies copies;
  };
  struct warp_record {
    exchanges* kept = nullptr;
    unsigned ready = ~0U;  // lanes in no meeting
    unsigned away = 0;     // lanes that have left or wait for the block
    unsigned to_run = 0;   // lanes that can go on
    std::size_t next = 1;
  };

  static void enter(void* self) {
    auto& b = *static_cast<block*>(self);
    try {
      b.run_();
    } catch (...) {
      b.failure_ = std::current_exception();
    }
    b.threads_[b.thread_].state = state::left;
    b.warps_[b.thread_ / 32].away |= 1U << b.thread_ % 32;
  }

  /// The caller's mask has lanes that will not come.
  [[noreturn]] void fail_without(std::size_t first, const meeting& call) const {
    const std::size_t lane =
        static_cast<std::size_t>(__builtin_ctz(call.mask & warps_[first / 32].away));
    const record& other = threads_[first + lane];
    fail("lane " + std::to_string(lane) + " of the mask " +
             (other.state == state::left ? "has left the kernel"
                                         : "waits in sync_block at " + text(other.call.at)),
         call);
  }

  /// All lanes of the mask have come: to the same call.
  void expect_same(std::size_t first, const meeting& call) const {
    for (std::size_t l = 0; l < 32; ++l) {
      if ((call.mask >> l & 1U) != 0 && !(threads_[first + l].call == call)) {
        fail("lane " + std::to_string(l) + " calls " + text(threads_[first + l].call), call);
      }
    }
  }

  void resolve(std::size_t first, unsigned mask, std::size_t size, bool orders) {
    warp_record& w = warps_[first / 32];
    w.ready |= mask;
    // All have read what they met for before; lanes by themselves leave alone what is for all.
    const bool every = mask == ~0U;
    exchange& all = (*w.kept)[every ? 0 : w.next];
    w.next = every ? 1 : 1 + w.next % (w.kept->size() - 1);
    all.reduced = false;
    index_t epoch = 0;
    for (std::size_t l = 0; l < 32; ++l) {
      epoch = std::max(epoch, (mask >> l & 1U) != 0 ? threads_[first + l].epoch : 0);
    }
    for (std::size_t l = 0; l < 32; ++l) {
      if ((mask >> l & 1U) == 0) {
        continue;
      }
      record& r = threads_[first + l];
      std::memcpy(all.value[l].data(), r.value.data(), size);
      r.exchanged = &all;
      r.epoch = orders ? epoch + 1 : r.epoch;
      if (first + l == thread_) {
        r.state = state::ready;  // and goes on
      } else {
        make_ready(first + l);
      }
    }
    if (traffic::current != nullptr && mask == ~0U) {
      traffic::current->settle(first);
    }
  }

  void settle_warps() const {
    for (std::size_t t = 0; traffic::current != nullptr && t < threads_.size(); t += 32) {
      traffic::current->settle(t);
    }
  }

  void end_launch_before() {
    try {
      const body ends = std::exchange(before_ends_, nullptr);
      ends ? ends() : void();
    } catch (...) {
      failure_ = std::current_exception();
    }
    for (const std::size_t t : for_launch_) {
      make_ready(t);
    }
    for_launch_.clear();
  }

  void release_barrier() {
    const meeting& call = threads_[0].call;
    for (std::size_t t = 0; t < threads_.size(); ++t) {
      record& r = threads_[t];
      if (r.call.at.line != call.at.line && !failure_) {
        failure_ = std::make_exception_ptr(
            error("thread 0 waits in " + text(call) + ", thread " + std::to_string(t) + " in " +
                  text(r.call) + ": all threads of a block must come to the same barrier"));
      }
      make_ready(t);
    }
    for (warp_record& w : warps_) {
      w.away = 0;
    }
    waiting_ = 0;
    ++barriers_;
    settle_warps();
    if (traffic::current != nullptr) {
      ++traffic::current->barriers;
    }
  }

  static std::string text(const meeting& call) {
    char mask[24] = "";
    if (call.mask != 0) {
      std::snprintf(mask, sizeof mask, ", mask 0x%08x", call.mask);
    }
    return std::string(call.name) + "(" + std::to_string(call.detail) + mask + ") at " +
           emulator::text(call.at);
  }
  static std::string text(site at) { return emulator::text(at); }
  std::string name() const {
    return "thread " + std::to_string(thread_) + " (lane " + std::to_string(thread_ % 32) + ")";
  }

  /// No thread can go on: one that waits for the block, and one that will not come.
  std::string stuck() const {
    std::string what = "divergent barrier: no thread can go on";
    bool in_block = false, in_warp = false, gone = false;
    for (std::size_t t = 0; t < threads_.size(); ++t) {
      const record& r = threads_[t];
      const std::string thread = "; thread " + std::to_string(t);
      if (r.state == state::block && !in_block) {
        what += thread + " waits in " + text(r.call), in_block = true;
      } else if (r.state == state::warp && !in_warp) {
        what += thread + " waits in " + text(r.call), in_warp = true;
      } else if (r.state == state::left && !gone) {
        what += thread + " has left the kernel", gone = true;
      }
    }
    return what;
  }

  std::vector<record> threads_;
  std::vector<warp_record> warps_;
  std::vector<std::size_t> ready_, for_launch_;  // warps with lanes to run; threads
  std::size_t waiting_ = 0, thread_ = 0;
  index_t barriers_ = 0;
  chance random_;
  body run_, before_ends_;
  std::exception_ptr failure_;
};

inline thread_local block* block::current = nullptr;

inline block& now() { return *block::current; }

}  // namespace kvmeld::cuda::emulator
