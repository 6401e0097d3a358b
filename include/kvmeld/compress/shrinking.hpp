// SPDX-License-Identifier: MIT
/// Memory that is given back: a cache, its states and scratch, of fewer slots.
#pragma once

#include <algorithm>  // std::max
#include <cstdint>    // std::int64_t

#include "kvmeld/compress/drafts.hpp"

namespace kvmeld::inline v0::detail {

template <policy P>
class shrinking : protected drafting<P> {
 protected:
  using base = drafting<P>;
  using base::at, base::kv_, base::states_, base::limits_;
  using base::base;

  void shrink_all(auto& kv, index_t capacity) {
    expects(kv_.is(&kv), "shrink: expected the cache that is compressed, got another");
    for (index_t r = 0; r < kv_.requests(); ++r) {
      this->expect_between("shrink", r);
    }
    std::int64_t least = 1;
    for (index_t h = 0; h < kv_.heads(); ++h) {
      const head_state& state = states_[at(h)];
      least = std::max<std::int64_t>(least, std::max(kv_.head(h).length(), state.length()));
      if (traits::evicts(this->policy_of(h))) {
        const budget& b = this->budget_of(h);
        const std::int64_t decoding = traits::supports_decode(this->policy_of(h)) ? 1 : 0;
        least = std::max({least, std::int64_t{b.slots} + b.slack + decoding,
                          decoding * limits_[at(h)].trigger_length()});
      }
    }
    expects(errc::no_capacity, capacity >= least, "shrink: expected a capacity of at least ", least,
            " slots (those in use, and the budgets), got ", capacity);
    kv.shrink(capacity);
    for (head_state& s : states_) {
      s.shrink(capacity);
    }
    this->pool_.shrink(capacity);
  }
};

}  // namespace kvmeld::inline v0::detail
