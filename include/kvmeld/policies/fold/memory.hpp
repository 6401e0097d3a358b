// SPDX-License-Identifier: MIT
/// What `fold` remembers of a head: some of the last steps' queries.
#pragma once

#include <algorithm>  // std::transform
#include <bit>        // std::bit_cast
#include <cstdint>
#include <cstring>  // std::memcpy

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/policies/fold/layout.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// A view of the flat floats in `head_state::memory`; read only when they are const.
template <class Float>
class fold_memory {
 public:
  fold_memory(std::span<Float> floats, index_t queries, index_t group, index_t dim)
      : floats_(floats), layout_{queries, group, dim} {}

  /// The positions of the prompts that have been scored, from the first one's queries on.
  struct positions {
    index_t begin, end;

    index_t count() const { return end - begin; }
    bool has(index_t position) const { return begin <= position && position < end; }
  };
  positions scored() const { return {get(prompt_begin), get(prompt_end)}; }
  void set_scored(const positions& p) { set(prompt_begin, p.begin), set(prompt_end, p.end); }

  /// Queries held per query head.
  index_t count() const { return get(held); }
  /// Query `i` of group member `g`, the oldest first, into `out [dim]`.
  void query(index_t g, index_t i, float* out) const {
    std::uint16_t bits[rotation::max_dim];
    std::memcpy(bits, at(g, slot_of(i)), bytes());
    std::transform(bits, bits + layout_.dim, out, [](std::uint16_t upper) {
      return std::bit_cast<float>(std::uint32_t{upper} << 16);
    });
  }
  index_t position(index_t i) const { return get(header + as_size(slot_of(i))); }

  /// A step's query `[group, dim]`. Every `stride`-th is held, and always the newest.
  void remember(const float* q, index_t position, index_t stride) {
    if (layout_.queries == 0) {
      return;
    }
    const index_t slot = get(next);
    for (index_t g = 0; g < layout_.group; ++g) {
      put(q + std::ptrdiff_t{g} * layout_.dim, at(g, slot));
    }
    set(header + as_size(slot), position);
    set(held, std::max(get(held), slot + 1));
    const index_t step = get(steps);
    set(newest, slot);
    set(next, layout_.next_slot(slot, step, stride));
    set(steps, (step + 1) % stride);
  }

  /// Reference queries: as many as there is room for, evenly spread. `next_position`: so far.
  void remember(const query_view<float>& reference, index_t next_position) {
    if (layout_.queries == 0) {
      return;
    }
    const index_t n = std::min(layout_.queries, reference.count);
    for (index_t i = 0; i < n; ++i) {
      const auto from = static_cast<index_t>(std::int64_t{i} * reference.count / n);
      set(header + as_size(i), reference.position_of(from, next_position));
      for (index_t g = 0; g < layout_.group; ++g) {
        put(reference.at(g, from), at(g, i));
      }
    }
    set(held, n), set(newest, n - 1), set(next, n % layout_.queries), set(steps, 0);
  }

 private:
  using enum fold_layout::field;
  index_t get(std::size_t i) const { return std::bit_cast<index_t>(floats_[i]); }
  void set(std::size_t i, index_t x) { floats_[i] = std::bit_cast<float>(x); }
  index_t slot_of(index_t i) const { return layout_.slot_of(i, get(held), get(newest)); }
  Float* at(index_t g, index_t slot) const { return floats_.data() + layout_.query(g, slot); }
  std::size_t bytes() const { return as_size(layout_.dim) * sizeof(std::uint16_t); }
  void put(const float* q, Float* to) const {
    std::uint16_t bits[rotation::max_dim];
    std::transform(q, q + layout_.dim, bits,
                   [](float x) { return static_cast<Eigen::bfloat16>(x).value; });
    std::memcpy(to, bits, bytes());
  }

  std::span<Float> floats_;
  fold_layout layout_;
};

}  // namespace detail
}  // namespace kvmeld::inline v0
