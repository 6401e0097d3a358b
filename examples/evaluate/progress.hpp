// SPDX-License-Identifier: MIT
/// How far the run is: one line, redrawn, on a terminal; elsewhere a plain line now and then.
#pragma once

#include <fmt/format.h>

#include <algorithm>  // std::min
#include <chrono>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>

namespace evaluate {

/// Work comes in stages, each of a weight that says about how long it takes.
class progress {
 public:
  progress(std::ostream& out, bool terminal) : out_(out), terminal_(terminal) {}
  ~progress() { clear(); }
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;

  /// The weights of all stages to come.
  void expect(double weight) { expected_ = weight; }
  /// The stage before it is over; `what` goes on now.
  void stage(std::string what, double weight) {
    const std::lock_guard lock(guard_);
    done_ += weight_;
    what_ = std::move(what);
    weight_ = weight;
    share_ = 0;
    show();
  }
  /// So much more of the stage, of 1.
  void add(double share) {
    const std::lock_guard lock(guard_);
    share_ += share;
    show();
  }
  /// Takes the line away, so that something else can be written.
  void clear() {
    const std::lock_guard lock(guard_);
    if (drawn_) {
      out_ << "\r\033[K" << std::flush;
      drawn_ = false;
    }
    shown_ = {};
  }

 private:
  using clock = std::chrono::steady_clock;

  static double seconds(clock::duration d) { return std::chrono::duration<double>(d).count(); }
  static std::string duration(double s) {
    const int whole = static_cast<int>(s + 0.5);
    return whole < 60 ? fmt::format("{} s", whole)
                      : fmt::format("{}:{:02} min", whole / 60, whole % 60);
  }

  void show() {
    const auto now = clock::now();
    const double share = expected_ > 0 ? std::min(1.0, (done_ + share_ * weight_) / expected_) : 0;
    const double spent = seconds(now - begin_);
    const std::string left =
        share > 0.02 ? duration(spent * (1 - share) / share) + " left" : std::string();
    if (terminal_) {
      if (shown_ != clock::time_point() && seconds(now - shown_) < 0.1) {
        return;
      }
      constexpr int width = 20;
      std::string bar;
      for (int i = 0; i < width; ++i) {
        bar += i < static_cast<int>(share * width) ? "█" : "░";
      }
      out_ << fmt::format("\r\033[K{} {:3.0f} %  {:<14}  {:.34}", bar, 100 * share, left, what_)
           << std::flush;
      drawn_ = true;
    } else {
      if (seconds(now - said_) < 15) {
        return;
      }
      out_ << fmt::format("{:3.0f} %  {:<14}  {}\n", 100 * share, left, what_) << std::flush;
      said_ = now;
    }
    shown_ = now;
  }

  std::ostream& out_;
  bool terminal_;
  std::mutex guard_;
  clock::time_point begin_ = clock::now(), shown_ = {}, said_ = begin_;
  std::string what_;
  double expected_ = 0, done_ = 0, weight_ = 0, share_ = 0;
  bool drawn_ = false;
};

}  // namespace evaluate
