// SPDX-License-Identifier: MIT
/// Emulates a card whose blocks have as little shared memory as any card's.
#pragma once

namespace kvmeld::cuda::emulator {

/// While one lives, this thread's device gives blocks no more shared memory than every card does.
class small_card {
 public:
  small_card() { ++alive(); }
  ~small_card() { --alive(); }
  small_card(const small_card&) = delete;
  small_card& operator=(const small_card&) = delete;
  static int& alive() {
    static thread_local int count = 0;
    return count;
  }
};

}  // namespace kvmeld::cuda::emulator
