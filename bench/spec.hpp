// SPDX-License-Identifier: MIT
/// The model of the benchmarks' caches.
#pragma once

#include "kvmeld/memory/attention_spec.hpp"

namespace bench {

inline kvmeld::attention_spec spec(kvmeld::index_t kv_heads, kvmeld::index_t group,
                                   kvmeld::index_t dim) {
  return {
      .kv_heads = kv_heads, .group = group, .key_dim = dim, .rope = kvmeld::rotary::halves(10'000)};
}

}  // namespace bench
