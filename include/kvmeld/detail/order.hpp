// SPDX-License-Identifier: MIT
/// Slots in the order of a number that each of them has.
#pragma once

#include <algorithm>  // std::nth_element
#include <bit>        // std::bit_cast
#include <concepts>   // std::integral
#include <cstdint>    // std::uint64_t
#include <span>
#include <utility>  // std::pair
#include <vector>

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// A vector that any integer indexes, as slots do.
template <class T>
struct slot_vector : std::vector<T> {
  using std::vector<T>::vector;

  T& operator[](std::integral auto i) { return std::vector<T>::operator[](as_size(i)); }
  const T& operator[](std::integral auto i) const { return std::vector<T>::operator[](as_size(i)); }
};

/// Unsigned integers in the order of `x`: no NaN; −0 is 0.
inline std::uint32_t ascending(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x + 0.0F);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffU : 0x80000000U);
}
inline std::uint64_t ascending(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x + 0.0);
  return bits ^ (bits >> 63 != 0 ? ~std::uint64_t{0} : std::uint64_t{1} << 63);
}
inline std::uint32_t ascending(index_t x) { return static_cast<std::uint32_t>(x) ^ 0x80000000U; }
/// By the first, then by the second.
inline std::uint64_t ascending(const std::pair<float, index_t>& x) {
  return std::uint64_t{ascending(x.first)} << 32 | ascending(x.second);
}

/// ... in the opposite order.
auto descending(const auto& x) { return ~ascending(x); }

/// A slot and its place in an order, ties to the lower slot. Sorting these is compiled once, not
/// once a policy, and a number is computed once a slot, not once a comparison.
struct keyed_slot {
  std::uint64_t key;
  index_t slot;

  friend bool operator<(const keyed_slot& a, const keyed_slot& b) {
    return a.key < b.key || (a.key == b.key && a.slot < b.slot);
  }
};

inline void sort(std::span<keyed_slot> slots) { std::sort(slots.begin(), slots.end()); }

/// Moves the first `count ≤ slots.size()` to the front, in no order.
inline void select(std::span<keyed_slot> slots, index_t count) {
  std::nth_element(slots.begin(), slots.begin() + count, slots.end());
}

template <class Key>
void assign_keys(std::span<const index_t> slots, Key key, std::vector<keyed_slot>& keyed) {
  keyed.clear();
  for (const index_t s : slots) {
    keyed.push_back({key(s), s});
  }
}

inline void copy_slots(std::span<const keyed_slot> keyed, std::span<index_t> slots) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i] = keyed[i].slot;
  }
}

/// Sorts `slots` by `key(s)`; `keyed` is scratch.
template <class Key>
void sort_slots(std::span<index_t> slots, Key key, std::vector<keyed_slot>& keyed) {
  assign_keys(slots, key, keyed);
  sort(keyed);
  copy_slots(keyed, slots);
}

/// Moves the `count ≤ slots.size()` slots of the lowest `key(s)` to the front, in no order.
template <class Key>
void select_slots(std::span<index_t> slots, index_t count, Key key,
                  std::vector<keyed_slot>& keyed) {
  assign_keys(slots, key, keyed);
  select(keyed, count);
  copy_slots(keyed, slots);
}

/// Sorts `slots` by position.
void sort_by_position(const auto& head, std::span<index_t> slots, std::vector<keyed_slot>& keyed) {
  sort_slots(
      slots, [&](index_t s) { return ascending(head.position(s)); }, keyed);
}

}  // namespace detail
}  // namespace kvmeld::inline v0
