// SPDX-License-Identifier: MIT
/// Blocks of a launch that have no head: part of the thin layer (`device.cuh`).
#pragma once

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

/// Is this block's place in the list of active heads empty (−1)? A graph replays the launches of as
/// many places as it was captured with. Kernels say by the list that they, or a part of theirs,
/// hold; others by `of_heads = false` that their blocks are not heads'.
template <class Part>
KVMELD_DEVICE bool is_idle(const Part& part) {
  if constexpr (requires { part.head() < 0; }) {
    return part.head() < 0;
  } else if constexpr (requires { part.cache.head(); }) {
    return is_idle(part.cache);
  } else if constexpr (requires { part.active.head(); }) {
    return is_idle(part.active);
  } else if constexpr (requires { part.call.cache; }) {
    return is_idle(part.call);
  } else if constexpr (requires { part.attend.call; }) {
    return is_idle(part.attend);
  } else if constexpr (requires { part.of.active; }) {
    return is_idle(part.of);
  } else if constexpr (requires { part.of.cache; }) {
    return is_idle(part.of);
  } else if constexpr (requires { part.x.active; }) {
    return is_idle(part.x);
  } else if constexpr (requires { part.first.cache; }) {
    return is_idle(part.first);
  } else {
    static_assert(
        requires { requires !Part::of_heads; },
        "kvmeld::cuda: expected a kernel with a cache_view `cache` or active_heads "
        "`active`, or one that says `of_heads = false`");
    return false;
  }
}

}  // namespace kvmeld::cuda::detail
