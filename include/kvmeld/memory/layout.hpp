// SPDX-License-Identifier: MIT
/// Where the rows of a head lie, and how engines lay out the keys (or values) of all their heads.
#pragma once

#include <cstddef>  // std::byte, std::ptrdiff_t
#include <limits>   // std::numeric_limits
#include <ranges>   // std::ranges::contiguous_range
#include <variant>

#include "kvmeld/config.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld {
inline namespace v0 {

/// Which pages a head's slots are in: slot `s` is in page `pages[s / slots]`. A view.
struct page_table {
  index_t* pages = nullptr;                             ///< [capacity / slots]; null: no pages
  index_t slots = 0;                                    ///< a page holds
  index_t limit = std::numeric_limits<index_t>::max();  ///< pages are 0 to `limit` − 1

  static constexpr index_t no_page = -1;  ///< until the engine has entered one

  /// Pages that `length` slots take.
  index_t taken_by(index_t length) const { return length / slots + (length % slots != 0 ? 1 : 0); }
};

/// The keys (or values) of one head, by strides in bytes. Element `i` of slot `s`, a number or a
/// block of numbers, is at
///
///     strided   data + s * row + i * element
///     in pages  data + page_of(s) * page + (s % slots) * row + i * element
struct head_rows {
  std::byte* data = nullptr;
  std::ptrdiff_t row = 0;
  std::ptrdiff_t element = 1;
  std::ptrdiff_t page = 0;

  std::byte* slot(index_t s) const { return data + s * row; }
  std::byte* slot(index_t s, const page_table& table) const {
    return data + table.pages[s / table.slots] * page + s % table.slots * row;
  }
};

/// How an engine lays out its keys (or values): n tokens (slots), h KV heads, d numbers of a head.
/// Layers are the outermost, then requests (in pages: then pages).
enum class layout {
  nhd,        ///< `[layers, requests, capacity, kv_heads, dim]`, as llama.cpp keeps keys
  hnd,        ///< `[layers, requests, kv_heads, capacity, dim]`
  hdn,        ///< `[layers, requests, kv_heads, dim, capacity]`: values transposed. Not in blocks
  pages_nhd,  ///< `[layers, pages, slots, kv_heads, dim]`, as vLLM's FlashAttention backend does
  pages_hnd   ///< `[layers, pages, kv_heads, slots, dim]`
};

/// A layout by hand: steps in elements (numbers, or blocks of numbers).
struct strides {
  std::ptrdiff_t layer = 0;
  std::ptrdiff_t request = 0;  ///< not in pages
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;  ///< slot to slot (of a page)
  std::ptrdiff_t element = 1;
  std::ptrdiff_t page = 0;  ///< in pages only
};

/// An engine's keys (or values), and how they are laid out. A view: the memory must live as long as
/// the cache that is made of it.
///
///     kvmeld::rows(k, kvmeld::layout::nhd)        // k: std::span<Eigen::half>, a std::vector, ...
class rows {
 public:
  template <std::ranges::contiguous_range R>
  requires std::ranges::sized_range<R> && storage_scalar<std::ranges::range_value_t<R>> rows(
      R&& elements, const std::variant<layout, strides>& how)
      : data_(reinterpret_cast<std::byte*>(std::ranges::data(elements))),
        size_(static_cast<std::ptrdiff_t>(std::ranges::size(elements))),
        type_(storage_of<std::ranges::range_value_t<R>>),
        how_(how) {}

  std::byte* data() const { return data_; }
  std::ptrdiff_t size() const { return size_; }  ///< in elements
  storage type() const { return type_; }
  const std::variant<layout, strides>& how() const { return how_; }

 private:
  std::byte* data_;
  std::ptrdiff_t size_;
  storage type_;
  std::variant<layout, strides> how_;
};

}  // namespace v0
}  // namespace kvmeld
