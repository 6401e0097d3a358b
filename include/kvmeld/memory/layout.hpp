// SPDX-License-Identifier: MIT
/// Where the rows of a head lie, and how engines lay out the keys (or values) of all their heads.
#pragma once

#include <algorithm>  // std::sort
#include <limits>     // std::numeric_limits
#include <span>
#include <variant>

#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0 {

/// Which pages a head's slots are in: slot `s` is in page `pages[s / slots]`. A view.
struct page_table {
  index_t* pages = nullptr;                             ///< [capacity / slots]; null: no pages
  index_t slots = 0;                                    ///< a page holds
  index_t limit = std::numeric_limits<index_t>::max();  ///< pages are 0 to `limit` − 1
  index_t skipped = 0;                                  ///< slots of the first that are another's

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
  std::byte* data = nullptr;   ///< of slot 0, or of the first page
  std::ptrdiff_t row = 0;      ///< bytes, slot to slot
  std::ptrdiff_t element = 1;  ///< bytes, element to element
  std::ptrdiff_t page = 0;     ///< bytes, page to page; 0: not in pages

  std::byte* slot(index_t s) const { return data + s * row; }  ///< where slot `s` is
  /// Where slot `s` is in pages.
  std::byte* slot(index_t s, const page_table& table) const {
    s += table.skipped;
    return data + table.pages[s / table.slots] * page + s % table.slots * row;
  }
};

/// How an engine lays out its keys (or values): n tokens (slots), h KV heads, d numbers of a head.
/// Layers are the outermost, then requests (in pages: then pages). Rows in blocks are whole blocks:
/// of dim 80 three of 32 numbers, the last filled with zeros.
enum class layout {
  nhd,        ///< `[layers, requests, capacity, kv_heads, dim]`, as llama.cpp keeps keys
  hnd,        ///< `[layers, requests, kv_heads, capacity, dim]`
  hdn,        ///< `[layers, requests, kv_heads, dim, capacity]`: values transposed. Not in blocks
  pages_nhd,  ///< `[layers, pages, slots, kv_heads, dim]`, as vLLM's FlashAttention backend does
  pages_hnd   ///< `[layers, pages, kv_heads, slots, dim]`
};

/// A layout by hand: steps in elements (numbers, or blocks of numbers).
struct strides {
  std::ptrdiff_t layer = 0;    ///< layer to layer
  std::ptrdiff_t request = 0;  ///< not in pages
  /// KV head to KV head.
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;      ///< slot to slot (of a page)
  std::ptrdiff_t element = 1;  ///< number to number, or block to block
  std::ptrdiff_t page = 0;     ///< in pages only

  bool operator==(const strides&) const = default;
};

/// An engine's keys (or values), and how they are laid out. A view: the memory must live as long as
/// the cache that is made of it.
///
///     kvmeld::rows(k, kvmeld::layout::nhd)        // k: std::span<Eigen::half>, a std::vector, ...
class rows {
 public:
  /// A span or vector of numbers or blocks, which has to live as long, and how they lie.
  template <class R>
  requires storage_scalar<detail::element_of<R>> rows(R&& elements,
                                                      const std::variant<layout, strides>& how)
      : data_(std::as_writable_bytes(std::span(elements)).data()),
        size_(static_cast<std::ptrdiff_t>(std::span(elements).size())),
        type_(storage_of<detail::element_of<R>>),
        how_(how) {}

  std::byte* data() const { return data_; }                          ///< the first element's
  std::ptrdiff_t size() const { return size_; }                      ///< in elements
  storage type() const { return type_; }                             ///< of its elements
  const std::variant<layout, strides>& how() const { return how_; }  ///< a known layout, or steps

 private:
  std::byte* data_;
  std::ptrdiff_t size_;
  storage type_;
  std::variant<layout, strides> how_;
};

/// An engine's keys (or values) of all layers in one memory, or, where it allocates each layer
/// apart, one of each layer: a `std::vector<rows>`, say.
class layer_rows {
 public:
  layer_rows(const rows& all) : list_(&all, 1) {}  ///< of all layers in one memory
  /// One of each layer, in their order; a list that has to live as long.
  template <class R>
  requires std::same_as<detail::element_of<const R>, rows> layer_rows(const R& each)
      : list_(each) {}

  std::span<const rows> list() const { return list_; }  ///< one, or one of each layer
  /// Of all of them.
  storage type() const { return list_.empty() ? storage::f32 : list_.front().type(); }

 private:
  std::span<const rows> list_;
};

/// How large a cache is.
struct cache_extents {
  index_t layers = 1;    ///< of the model
  index_t requests = 1;  ///< sequences held at once
  index_t capacity = 0;  ///< slots per head
};

/// The page tables of a `paged_cache`: `[requests, capacity / slots]` where all layers and heads of
/// a request share one, else `[layers, requests, ...]` or `[layers, requests, kv_heads, ...]`.
struct page_tables {
  std::span<index_t> pages = {};  ///< −1 (`page_table::no_page`) until the engine has entered one
  index_t slots = 0;              ///< a page holds
  std::ptrdiff_t stride = 0;      ///< from one table to the next; 0: capacity / slots
};

/// ... checked. Heads that follow one another share a table; so do layers, where tables end.
struct placed_tables {
  page_table first = {};              ///< no pages: rows are strided
  std::ptrdiff_t stride = 0;          ///< from one table to the next
  index_t heads_each = 1, count = 1;  ///< heads of a table; tables

  /// That of head `h`.
  page_table of(index_t h) const {
    page_table x = first;
    x.pages += x.pages == nullptr ? 0 : h / heads_each % count * stride;
    return x;
  }
  /// Calls `use` with every head, of `heads`, that has the table of head `h`.
  void each_sharing(index_t h, index_t heads, auto use) const {
    for (index_t block = h / heads_each % count; block * heads_each < heads; block += count) {
      for (index_t i = 0; i < heads_each; ++i) {
        use(block * heads_each + i);
      }
    }
  }
};

/// The keys (or values) of all heads by strides in bytes.
struct placed_rows {
  std::byte* data = nullptr;                        ///< of the first layer, request and head
  std::ptrdiff_t layer = 0, request = 0, head = 0;  ///< bytes, each to each
  head_rows first = {};                             ///< of the first head; its data is `data`

  /// Those of KV head `h` of layer `l` and request `r`.
  head_rows of(index_t l, index_t r, index_t h) const {
    head_rows x = first;
    x.data = data + l * layer + r * request + h * head;
    return x;
  }
};

namespace detail {

/// One index of a memory: how far its steps go, and how many values it has.
struct axis {
  std::ptrdiff_t stride;
  index_t count;
};

/// From the shortest stride to the longest.
inline std::vector<axis> by_stride(std::vector<axis> axes) {
  std::sort(axes.begin(), axes.end(),
            [](const axis& a, const axis& b) { return a.stride < b.stride; });
  return axes;
}

/// Strides in elements of a layout: `slots` of a head, or of a page.
inline strides strides_of(layout how, const attention_spec& spec, const cache_extents& e,
                          index_t row_size, index_t slots, std::ptrdiff_t size) {
  const std::ptrdiff_t n = row_size, row = spec.kv_heads * n, block = slots * row;
  strides s{.layer = e.requests * block, .request = block};
  switch (how) {
    case layout::nhd:
    case layout::pages_nhd:
      s.head = n, s.row = row;
      break;
    case layout::hnd:
    case layout::pages_hnd:
      s.head = slots * n, s.row = n;
      break;
    case layout::hdn:
      s.head = slots * n, s.row = 1, s.element = slots;
  }
  if (how == layout::pages_nhd || how == layout::pages_hnd) {
    s.layer = size / e.layers, s.request = 0, s.page = block;
  }
  return s;
}

/// Places an engine's rows of `dim`; of a cache in pages of `page_slots` slots, else 0. `what`:
/// "keys" or "values". `pages`: how many there are. `own_tables`: each head has pages of its own.
/// Refused: null, another layout or its strides, blocks that do not lie side by side, rows that
/// overlap, less memory than the strides reach.
inline placed_rows place_rows(const char* call, const char* what, const rows& from, index_t dim,
                              const attention_spec& spec, const cache_extents& e,
                              index_t page_slots, index_t& pages, bool own_tables = false) {
  const bool paged = page_slots > 0;
  const index_t per_element = numbers_of(from.type()), slots = paged ? page_slots : e.capacity,
                row_size = kvmeld::row_size(from.type(), dim);
  expects(from.data() != nullptr, call, ": expected ", what, ", got null");
  if (const auto* how = std::get_if<layout>(&from.how())) {
    const bool in_pages = *how == layout::pages_nhd || *how == layout::pages_hnd;
    expects(in_pages == paged, call, ": expected ", what, " laid out as ",
            paged ? "pages_nhd or pages_hnd, got nhd, hnd or hdn"
                  : "nhd, hnd or hdn, got pages_nhd or pages_hnd");
    expects(*how != layout::hdn || per_element == 1, call, ": expected ", what,
            " of numbers in hdn, got blocks");
  }
  const strides s =
      std::holds_alternative<strides>(from.how())
          ? std::get<strides>(from.how())
          : strides_of(std::get<layout>(from.how()), spec, e, row_size, slots, from.size());
  expects((paged ? s.request : s.page) == 0, call, ": expected ", what, " without a ",
          paged ? "request stride (a cache in pages)" : "page stride (a cache without pages)",
          ", got ", paged ? s.request : s.page);
  expects(s.element == 1 || per_element == 1, call, ": expected ", what,
          " of blocks with an element stride of 1, got ", s.element);
  // Beyond any memory it stays at the most: a product of strides and counts may be no number.
  const auto reached = [](std::ptrdiff_t before, const axis& a) {
    constexpr auto most = std::numeric_limits<std::ptrdiff_t>::max() / 64;
    const std::ptrdiff_t steps = a.count - 1;
    return steps == 0 || a.stride <= (most - before) / steps ? before + steps * a.stride : most;
  };
  // From the shortest stride to the longest, each must step over all that the shorter ones reach.
  const auto reach_of = [&](std::vector<axis> axes) {
    std::ptrdiff_t reach = 1;
    for (const axis& a : by_stride(std::move(axes))) {
      expects(a.count == 1 || a.stride >= reach, call, ": expected ", what,
              " that do not overlap, got layer stride ", s.layer, ", request stride ", s.request,
              ", head stride ", s.head, ", row stride ", s.row, ", element stride ", s.element,
              " and page stride ", s.page, " for [", e.layers, ", ", e.requests, ", ",
              spec.kv_heads, ", ", slots, ", ", dim, "]");
      reach = reached(reach, a);
    }
    return reach;
  };
  // Heads with tables of their own do not share pages, so they may lie at one place of a page.
  const axis layers{s.layer, own_tables ? 1 : e.layers},
      heads{s.head, own_tables ? 1 : spec.kv_heads}, rows_of{s.row, slots},
      elements{s.element, row_size};
  expects(!own_tables || (s.layer >= 0 && s.head >= 0), call, ": expected ", what,
          " with layer and head strides of at least 0, got ", s.layer, " and ", s.head);
  const auto beside = [&](std::ptrdiff_t reach) {
    return own_tables ? reached(reached(reach, {s.layer, e.layers}), {s.head, spec.kv_heads})
                      : reach;
  };
  axis outer{s.request, e.requests};
  if (paged) {
    const std::ptrdiff_t one = beside(reach_of({layers, heads, rows_of, elements}));
    expects(s.page > 0, call, ": expected ", what, " with a page stride above 0, got ", s.page);
    const std::ptrdiff_t there = from.size() < one ? 0 : (from.size() - one) / s.page + 1;
    pages =
        static_cast<index_t>(std::min(there, std::ptrdiff_t{std::numeric_limits<index_t>::max()}));
    outer = {s.page, std::max(pages, index_t{1})};
  }
  const std::ptrdiff_t reach = beside(reach_of({layers, outer, heads, rows_of, elements}));
  expects(reach <= from.size(), call, ": expected ", what, " of at least ", reach * per_element,
          " numbers, got ", from.size() * per_element);
  const auto bytes = static_cast<std::ptrdiff_t>(element_bytes(from.type()));
  return {from.data(),
          s.layer * bytes,
          paged ? 0 : s.request * bytes,
          s.head * bytes,
          {from.data(), s.row * bytes, s.element * bytes, s.page * bytes}};
}

/// Do two memories of these axes share a byte of an element of `bytes`, the second one `apart`
/// bytes after the first? Axes from the shortest stride on, in bytes; each steps over all that
/// those before it reach, so that its nearest steps alone can bring the two together.
inline bool meet(std::ptrdiff_t apart, std::span<const axis> axes, std::ptrdiff_t bytes) {
  if (axes.empty()) {
    return apart < bytes && -apart < bytes;
  }
  const auto [stride, count] = axes.back();
  const std::ptrdiff_t near = count == 1 ? 0 : apart / stride;
  for (std::ptrdiff_t i = near - 1; i <= near + 1; ++i) {
    if (i < count && -i < count && meet(apart - i * stride, axes.first(axes.size() - 1), bytes)) {
      return true;
    }
  }
  return false;
}

/// Do the rows of two layers share a byte? `at`: of the first one; `outer`: its requests, or pages.
/// Layers that are laid out differently are told apart by where their memory ends.
inline bool share_bytes(const rows& a, const rows& b, const placed_rows& at, const axis& outer,
                        index_t heads, index_t slots, index_t elements) {
  const auto bytes = static_cast<std::ptrdiff_t>(element_bytes(a.type()));
  const auto apart = static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(b.data()) -
                                                 reinterpret_cast<std::uintptr_t>(a.data()));
  if (apart >= a.size() * bytes || -apart >= b.size() * bytes) {
    return false;
  }
  const auto axes = by_stride({outer, {at.first.row, slots}, {at.first.element, elements}});
  bool shared = a.how() != b.how();
  for (index_t h = 1 - heads; h < heads && !shared; ++h) {  // heads may lie at one place of a page
    shared = meet(apart + h * at.head, axes, bytes);
  }
  return shared;
}

}  // namespace detail

}  // namespace kvmeld::inline v0
