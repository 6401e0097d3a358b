// SPDX-License-Identifier: MIT
/// A layer's keys and values in another storage.
#pragma once

#include "kvmeld/kvmeld.hpp"

namespace evaluate {

using kvmeld::index_t;
using kvmeld::storage;

/// The slots of `kv`, all of one request, each number rounded once.
/// Refused: a dim that is no whole blocks of the storage.
inline kvmeld::cache stored(kvmeld::cache& kv, storage type) {
  kvmeld::cache to(
      kv.spec(), {.layers = kv.layers(), .capacity = kv.capacity(), .keys = type, .values = type});
  for (index_t h = 0; h < kv.heads(); ++h) {
    kvmeld::detail::copy_slots(kv.head(h), to.head(h));
  }
  return to;
}

}  // namespace evaluate
