// SPDX-License-Identifier: MIT
/// Views of key-value memory: one KV head as policies read it, wherever the engine keeps it.
#pragma once

#include <algorithm>  // std::max
#include <bit>        // std::bit_cast
#include <cmath>      // std::isfinite
#include <concepts>   // std::same_as
#include <cstddef>    // std::ptrdiff_t
#include <cstdint>    // std::uint32_t

#include "kvmeld/config.hpp"
#include "kvmeld/memory/head_ref.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld {
inline namespace v0 {

/// One KV head, as policies are written for: a `head_ref`, or one that knows its scalar.
template <class H>
concept kv_head = (storage_scalar<typename H::scalar> ||
                   std::same_as<typename H::scalar, any_scalar>)&&requires(const H& head,
                                                                           index_t s) {
  { head.length() } -> std::same_as<index_t>;
  { head.capacity() } -> std::same_as<index_t>;
  { head.dim() } -> std::same_as<index_t>;
  { head.group() } -> std::same_as<index_t>;
  { head.next_position() } -> std::same_as<index_t>;
  { head.scale() } -> std::same_as<float>;
  { head.check_finite() } -> std::same_as<bool>;
  { head.spec() } -> std::same_as<const attention_spec&>;
  { head.key(s) } -> std::same_as<row<typename H::scalar>>;
  { head.value(s) } -> std::same_as<row<typename H::scalar>>;
  { head.log_mass(s) } -> std::same_as<float&>;
  { head.position(s) } -> std::same_as<index_t&>;
  head.truncate(s);
};

static_assert(kv_head<head_ref>);

/// All KV heads (layer × request × KV head, flattened) of one shape, each with its own length:
/// whatever gives a `head_ref` for each of them.
template <class C>
concept kv_cache = requires(C& cache, index_t h) {
  { cache.heads() } -> std::same_as<index_t>;
  { cache.head(h) } -> std::convertible_to<head_ref>;
};

/// The latest position a head holds; -1 when it is empty. Recency is measured from here.
index_t newest_position(const kv_head auto& head) {
  index_t newest = -1;
  for (index_t s = 0; s < head.length(); ++s) {
    newest = std::max(newest, head.position(s));
  }
  return newest;
}

namespace detail {

/// Are the numbers `x [count]` neither NaN nor Inf? By their bits, at the width of a vector.
inline bool all_finite(const float* x, index_t count) {
  constexpr std::uint32_t exponent = 0x7F800000U;
  std::uint32_t found = 0;
  for (index_t i = 0; i < count; ++i) {
    found |=
        static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x[i]) & exponent) == exponent);
  }
  return found == 0;
}

}  // namespace detail

/// Refuses NaN and Inf, naming the first: an option of the cache (`check_finite`), one pass.
/// `expected`: "call: expected finite name".
template <class T>
void expect_finite(const char* expected, const T* data, std::ptrdiff_t count) {
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const auto x = static_cast<float>(data[i]);
    expects(errc::not_finite, std::isfinite(x), expected, ", got ", x, " at element ", i);
  }
}

}  // namespace v0
}  // namespace kvmeld
