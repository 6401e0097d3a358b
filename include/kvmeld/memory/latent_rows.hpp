// SPDX-License-Identifier: MIT
/// Rows whose first numbers are the values: what latent attention (MLA) keeps of a token.
#pragma once

#include <vector>

#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0::detail {

/// Refuses models whose values cannot be the first numbers of the keys: longer ones, those that end
/// within a block, those that turn with the keys.
inline void expect_latent(const char* call, const std::vector<attention_spec>& specs,
                          storage type) {
  constexpr const char* where = ", where values are the keys' first numbers, got ";
  for (const attention_spec& s : specs) {
    const index_t values = s.value_dim, dim = s.key_dim, first = s.rope.first(dim);
    expects(values <= dim, call, ": expected a value_dim of at most ", dim, where, values);
    expects(values % numbers_of(type) == 0, call, ": expected a value_dim of whole blocks", where,
            values);
    expects(s.rope.rotated(dim) == 0 || first >= values, call,
            ": expected a rope that turns none of the first ", values, " numbers (rotary::last)",
            where, "one that turns number ", first);
  }
}

}  // namespace kvmeld::inline v0::detail
