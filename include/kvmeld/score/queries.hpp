// SPDX-License-Identifier: MIT
/// Reference queries: what a policy measures slots on. Where they come from is the engine's choice.
#pragma once

#include <cstddef>  // std::ptrdiff_t

#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/accumulated.hpp"

namespace kvmeld {
inline namespace v0 {

/// Queries of all heads, rotated, over an engine's own memory: query `i` of group member `g` of KV
/// head `h` starts at `data[h * head + g * group + i * row]` and is contiguous `[dim]`.
template <plain_scalar Scalar>
struct query_view {
  const Scalar* data = nullptr;
  index_t count = 0;         ///< queries per query head
  std::ptrdiff_t head = 0;   ///< stride in elements, KV head to KV head
  std::ptrdiff_t group = 0;  ///< query head to query head of one KV head
  std::ptrdiff_t row = 0;    ///< query to query
  /// `[count]`, for causality. Null: a prompt's own, at the last `count` positions; given:
  /// reference queries that the caller chose, which policies take whole.
  const index_t* position = nullptr;
  /// Of a prompt in chunks: queries of the same prompt that lie right before these, which windows
  /// reach back to. Not counted again.
  index_t before = 0;
  /// `[group, count]` of one head's logits, natural logarithm, from the prefill's own attention;
  /// null: not known. Not of those before.
  const float* log_sum_exp = nullptr;

  const Scalar* at(index_t g, index_t i) const { return data + g * group + i * row; }
  /// The queries of KV head `h` alone.
  query_view of(index_t h) const {
    const Scalar* const own = data == nullptr ? nullptr : data + h * head;  // null: there are none
    return {own, count, 0, group, row, position, before};
  }
  /// The last `n`, of a prompt's own with those before them: where a view is to end at its first
  /// query, its `before` is set to 0.
  query_view last(index_t n) const {
    const index_t earlier = position != nullptr ? 0 : before, all = count + earlier,
                  skip = all > n ? all - n : 0, first = skip - earlier;
    return {data == nullptr ? nullptr : data + first * row,   all - skip, head, group, row,
            position != nullptr ? position + first : nullptr, skip};
  }
  /// What a policy with a window measures on: the last `window` of a prompt's own, or all that was
  /// chosen.
  query_view reference(index_t window) const { return position != nullptr ? *this : last(window); }
  /// Position of query `i`, for a head that has seen `next_position` tokens.
  index_t position_of(index_t i, index_t next_position) const {
    return position != nullptr ? position[i] : next_position - count + i;
  }
};

/// For policies that need none.
inline constexpr query_view<float> no_queries{};

/// A prompt's own queries, rotated (after RoPE): `[queries, heads · group, dim]`.
template <plain_scalar Scalar>
query_view<Scalar> prompt_queries(const Scalar* data, index_t count, index_t heads, index_t group,
                                  index_t dim) {
  return {data, count, std::ptrdiff_t{group} * dim, dim, std::ptrdiff_t{heads} * group * dim};
}

}  // namespace v0
}  // namespace kvmeld
