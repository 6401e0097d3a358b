// SPDX-License-Identifier: MIT
/// Budgets in bytes: how many slots fit.
#pragma once

#include <algorithm>  // std::max
#include <cstdint>

#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/policies/declared.hpp"

namespace kvmeld::inline v0 {

/// Bytes that the keys and values of `tokens` tokens of a request take in 16 bits, in the layers
/// without a window. Refused: fewer than no tokens.
template <kv_cache Cache>
std::int64_t bytes_in_half(Cache& kv, index_t tokens) {
  expects(tokens >= 0, "bytes_in_half: expected at least 0 tokens, got ", tokens);
  std::int64_t numbers = 0;
  const detail::cache_ref all(kv);
  for (index_t i = 0; i < all.per_request(); ++i) {
    const head_ref head = all.head(all.of_request(0, i));
    numbers += head.spec().window > 0 ? 0 : head.dim() + head.own_value_dim();
  }
  return numbers * tokens * std::int64_t{sizeof(Eigen::half)};
}

namespace detail {

/// The slots of `b`, of which all heads of a request without a window, in all with their slack and
/// states, take at most its bytes; no more than a head has room for.
/// Refused: fewer bytes than a slot of each head takes.
template <policy P>
budget in_slots(budget b, const P& p, const cache_ref& kv) {
  index_t heads = 0, any = 0;
  for (index_t i = 0; i < kv.per_request(); ++i) {
    const index_t h = kv.of_request(0, i);
    if (kv.head(h).spec().window == 0) {
      ++heads, any = h;
    }
  }
  const head_ref head = kv.head(any);
  const index_t room = head.capacity() - 1 - b.slack;
  // What heads keep that share slots does not depend on how many these are.
  const P q = b.is_shared && room > 0 ? for_shared(p, room, b.slack, b.alike) : p;
  const auto bytes_of = [&](index_t slots) {
    const index_t all = slots + b.slack;
    const std::size_t columns = as_size(declared(q).columns()),
                      memory = declared(q).memory(head.row_dim(), head.group(), head.capacity()),
                      each = head_bytes(head.type(), head.dim(), head.own_value_dim(), all) +
                             as_size(all) * (sizeof(float) * (columns + 1) + sizeof(index_t)) +
                             sizeof(float) * memory;
    return static_cast<std::int64_t>(each) * heads;
  };
  expects(bytes_of(1) <= b.size, "compressor: expected a budget of at least ", bytes_of(1),
          " bytes (a slot in each of ", heads, " heads, and its slack), got ", b.size);
  b.slots = 1;  // whether the policy can do with as many as are found, its own check says
  for (index_t above = std::max(room, 1) + 1; b.slots + 1 < above;) {
    const index_t slots = b.slots + (above - b.slots) / 2;
    (bytes_of(slots) <= b.size ? b.slots : above) = slots;
  }
  b.size = 0;
  return b;
}

}  // namespace detail
}  // namespace kvmeld::inline v0
