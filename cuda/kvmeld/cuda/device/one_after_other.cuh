// SPDX-License-Identifier: MIT
/// Two kernels as one launch.
#pragma once

#include <algorithm>    // std::max
#include <type_traits>  // std::is_void_v

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

/// How many blocks of a kernel a multiprocessor is to hold.
template <class Kernel>
inline constexpr index_t at_once = 1;
template <class Kernel>
requires requires { Kernel::resident; }
inline constexpr index_t at_once<Kernel> = Kernel::resident;

/// A block does what a block of `First` does, then what one of `Second` does on the same grid.
/// `Second` may read what the same block of `First` has written, of no other block. A `First` that
/// returns false to all threads of a block is all that this block does.
template <class First, class Second>
struct one_after_other {
  static_assert(First::threads == Second::threads);
  static constexpr index_t threads = First::threads;
  static constexpr index_t resident = std::max(at_once<First>, at_once<Second>);
  struct shared_memory {
    typename First::shared_memory first;
    typename Second::shared_memory second;
  };

  First first;
  Second second;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    if constexpr (std::is_void_v<decltype(first(shared.first))>) {
      first(shared.first);
    } else if (!first(shared.first)) {
      return;
    }
    sync_block();
    second(shared.second);
  }
};

}  // namespace kvmeld::cuda::detail
