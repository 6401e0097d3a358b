// SPDX-License-Identifier: MIT
/// Caches: one that owns its memory, one over an engine's rows, one over an engine's pages.
#pragma once

#include <algorithm>  // std::max
#include <span>
#include <vector>

#include "kvmeld/memory/cache_base.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// What has one owner at a time.
struct move_only {
  move_only() = default;
  move_only(move_only&&) = default;
  move_only& operator=(move_only&&) = default;
};

}  // namespace detail

/// How large a cache with memory of its own is, and what it holds keys and values as.
struct cache_options {
  index_t layers = 1;
  index_t requests = 1;
  index_t capacity = 0;  ///< slots per head
  storage keys = storage::f32;
  storage values = storage::f32;
};

/// Keys `[heads, capacity, key_dim]` and values `[heads, capacity, value_dim]`, owned.
///
///     kvmeld::cache kv(spec, {.layers = 32, .requests = 8, .capacity = 4096});
///     kv.append(kv.heads(layer, request), k, v, tokens);   // [tokens, kv_heads, ...] each
///
/// `spec`: of all layers, or a span with one for each, of which rope and scale may differ.
/// Refused: shapes that cannot be.
class cache : public cache_base {
 public:
  cache(const attention_spec& spec, const cache_options& o) : cache(std::span(&spec, 1), o) {}
  cache(std::span<const attention_spec> specs, const cache_options& o)
      : cache_base(checked(specs, {o.layers, o.requests, o.capacity}),
                   {o.layers, o.requests, o.capacity}, {o.keys, o.values}) {
    place();
  }
  cache(const cache& other) : cache_base(other) {
    place();
    records().copy_rows(other.key_rows_, key_rows_, row_bytes(type().keys, spec().key_dim));
    records().copy_rows(other.value_rows_, value_rows_, row_bytes(type().values, spec().value_dim));
  }
  cache(cache&&) noexcept = default;
  cache& operator=(const cache& other) {
    cache copy = other;
    return *this = std::move(copy);
  }
  cache& operator=(cache&&) noexcept = default;
  ~cache() = default;

  /// As of every cache, rows included: memory is held for those that were written to.
  /// @{
  std::size_t reserved_bytes() const {
    return cache_base::reserved_bytes() + key_rows_.held() + value_rows_.held();
  }
  void give_back(index_t h, index_t slots = 0) {
    cache_base::give_back(h, slots);
    records().give_back(h, slots, key_rows_, row_bytes(type().keys, spec().key_dim));
    records().give_back(h, slots, value_rows_, row_bytes(type().values, spec().value_dim));
  }
  /// @}

  /// Lowers the capacity of all heads to `capacity` slots and gives the rest back. Rows stay where
  /// they are; views of heads keep the capacity that they were made with.
  /// Refused, with nothing changed: more slots than there are, fewer than a head holds.
  void shrink(index_t capacity) {
    expects(capacity > 0 && capacity <= this->capacity(), "shrink: expected a capacity of 1 to ",
            this->capacity(), " slots, got ", capacity);
    for (index_t h = 0; h < heads(); ++h) {
      expects(errc::no_capacity, length(h) <= capacity, "shrink: expected a capacity of at least ",
              length(h), " slots, got ", capacity);
    }
    lower_capacity(capacity);
    for (index_t h = 0; h < heads(); ++h) {
      give_back(h);
    }
  }
  /// The same for a cache that `meld` compresses, whose budgets it must hold: `kv.shrink(meld,
  /// 96)`.
  template <class Compressor>
  void shrink(Compressor& meld, index_t capacity) {
    meld.shrink(*this, capacity);
  }

 private:
  void place() {
    const auto at = [&](detail::reserved& memory, storage type, index_t dim) {
      const auto row = static_cast<std::ptrdiff_t>(row_bytes(type, dim)),
                 element = static_cast<std::ptrdiff_t>(element_bytes(type)),
                 head = records().capacity() * row, request = kv_heads() * head;
      memory = detail::reserved(as_size(heads(), records().capacity()) * as_size(row));
      return placed_rows{
          memory.data(), requests() * request, request, head, {memory.data(), row, element}};
    };
    set_rows(at(key_rows_, type().keys, spec().key_dim),
             at(value_rows_, type().values, spec().value_dim));
  }

  detail::reserved key_rows_, value_rows_;
};

/// A `kv_cache` over an engine's own keys and values; log-mass, positions and lengths are kept
/// here. Tokens that are already in the engine's memory are taken in with `commit`.
///
///     kvmeld::strided_cache over(spec, {.layers = 1, .requests = 1, .capacity = cells},
///                                kvmeld::rows(k, kvmeld::layout::nhd),
///                                kvmeld::rows(v, kvmeld::layout::nhd));
///
/// An engine that allocates each layer apart gives a `std::vector<kvmeld::rows>`, one of each.
/// Movable, not copyable: two views of the same rows would each count their own slots. Refused: as
/// of `cache`, memory that is too small for the layout, and rows that overlap: of one layer, or of
/// two that are given apart. Such layers may interleave, as in an engine that holds `[slots,
/// layers]` rows, if they are laid out alike. Keys are not compared with values.
class strided_cache : public cache_base, detail::move_only {
 public:
  strided_cache(const attention_spec& spec, const cache_extents& extents, const layer_rows& keys,
                const layer_rows& values)
      : strided_cache(std::span(&spec, 1), extents, keys, values) {}
  strided_cache(std::span<const attention_spec> specs, const cache_extents& extents,
                const layer_rows& keys, const layer_rows& values)
      : cache_base(checked(specs, extents), extents, {keys.type(), values.type()}) {
    place("strided_cache", keys, values);
  }
};

/// A `kv_cache` over an engine's pages; log-mass, positions and lengths are kept here. The engine
/// enters a page in the table before a slot needs it.
///
///     kvmeld::paged_cache kv(spec, {.layers = 32, .requests = 8, .capacity = 4096},
///                            kvmeld::rows(k, kvmeld::layout::pages_nhd),
///                            kvmeld::rows(v, kvmeld::layout::pages_nhd),
///                            {.pages = block_tables, .slots = 16});
///
/// Tables of several requests may list the same pages, as those of a common prefix, until a call of
/// `append` or of a compressor would change rows in them: the cache counts the tables that have a
/// page in use, and refuses; `compressor::seal` keeps a prefix from being changed. A page that a
/// table lists no longer counts until the next call for its request: `free_pages`, say, or `clear`.
/// Rows that are pushed to a head, or changed by the functions of one head, are the caller's to
/// keep apart.
///
/// Movable, not copyable, as `strided_cache`. Refused: as there, a capacity of no whole pages,
/// tables of another size.
class paged_cache : public cache_base, detail::move_only {
 public:
  paged_cache(const attention_spec& spec, const cache_extents& extents, const layer_rows& keys,
              const layer_rows& values, const page_tables& tables)
      : paged_cache(std::span(&spec, 1), extents, keys, values, tables) {}
  paged_cache(std::span<const attention_spec> specs, const cache_extents& extents,
              const layer_rows& keys, const layer_rows& values, const page_tables& tables)
      : cache_base(checked(specs, extents), extents, {keys.type(), values.type()}) {
    expects(tables.pages.data() != nullptr, "paged_cache: expected page tables, got null");
    expects(tables.slots > 0 && capacity() % tables.slots == 0,
            "paged_cache: expected a capacity of whole pages, got ", capacity(),
            " slots in pages of ", tables.slots);
    place("paged_cache", keys, values, shared(tables));
    const bool own_tables = kv_heads() > 1 && this->tables().heads_each == 1;
    counts_ = page_counts(this->tables(), extents, kv_heads(), layers_apart(),
                          own_tables && heads_apart());
  }

  /// As of every cache. Refused too: pages to write to that another table has in use.
  void append(const head_selection& heads, const any_span& k, const any_span& v, index_t tokens) {
    expect_append(heads, k, v, tokens);
    const auto each = [&](const auto& use) {
      for (index_t i = 0; i < heads.count(); ++i) {
        use(heads[i]);
      }
    };
    const auto expect_own = [&](index_t h) {
      expect_own_pages("append", h, length(h), length(h) + tokens);
    };
    // Where it is refused, what the tokens would have had in use is not.
    detail::or_undo([&] { each(expect_own); }, [&] { each([&](index_t h) { count_pages(h); }); });
    append_rows(heads, k, v, tokens);
  }
  /// As of every cache: rows of a prefix may lie in pages that other tables have too.
  void commit(const head_selection& heads, index_t tokens) {
    cache_base::commit(heads, tokens);
    for (index_t i = 0; i < heads.count(); ++i) {
      counts_.take(heads[i], taken(heads[i]));
    }
  }

  using cache_base::table;

  /// Do two heads share a page table?
  bool share_table(index_t a, index_t b) const { return table(a).pages == table(b).pages; }
  /// Pages that the table of head `h` has for slots in use, of this head and of those that share
  /// it. No others count as in use from here on. Needs these heads to itself. Refused: a head that
  /// is not there.
  index_t pages(index_t h) {
    (void)head(h);
    index_t most = 0;
    tables().each_sharing(h, heads(), [&](index_t i) {
      most = std::max(most, taken(i));
      counts_.take(i, taken(i));
    });
    count_pages(h);
    return most;
  }
  /// Counts anew which pages the heads of a table have in use, head `h` by its length, the others
  /// as their last calls left them. Threads may, each for heads of its own.
  void count_pages(index_t h) { counts_.take_only(h, taken(h), capacity() / table(h).slots); }
  /// The table's entries after those: after a compression, the pages that it has freed, and what
  /// was −1 before.
  std::span<const index_t> free_pages(index_t h) {
    const index_t used = pages(h);
    const page_table own = table(h);
    return std::span<const index_t>(own.pages, as_size(capacity() / own.slots))
        .subspan(as_size(used));
  }
  /// The same for heads that share a table: those of a layer and request, or of a request.
  /// Refused: heads of several tables.
  std::span<const index_t> free_pages(const head_selection& heads) {
    heads.check("free_pages", this->heads());
    for (index_t i = 0; i < heads.count(); ++i) {
      expects(share_table(heads[i], heads[0]),
              "free_pages: expected heads of one table, got several");
    }
    return heads.count() > 0 ? free_pages(heads[0]) : std::span<const index_t>();
  }

  /// Refused: a call that changes rows of slots `from` to `to` − 1 of head `h` in a page that
  /// another table has in use. Where head `like` has the page for the same slots, it may. O(pages)
  /// of the head; of other requests, reads and writes the counts alone, which are atomic.
  void expect_own_pages(const char* call, index_t h, index_t from, index_t to, index_t like = -1) {
    if (counts_.empty()) {
      return;
    }
    const page_table own = table(h);
    const index_t last = own.taken_by(to);
    const auto first_shared = [&] {
      for (index_t i = from / own.slots; i < last && from < to; ++i) {
        if (counts_.shared(h, own.pages[i]) && (like < 0 || table(like).pages[i] != own.pages[i])) {
          return own.pages[i];
        }
      }
      return page_table::no_page;
    };
    const index_t most = std::max(last, taken(h));
    counts_.take(h, most);
    if (first_shared() == page_table::no_page) {
      return;
    }
    count_pages(h);  // the engine may have put the table in another order since
    counts_.take(h, most);
    const index_t page = first_shared();
    expects(page == page_table::no_page, call,
            ": expected pages that no other table has in use where rows are changed, got page ",
            page, " in a table of head ", h);
  }

 private:
  /// Entries of its table that head `h` has in use.
  index_t taken(index_t h) const { return table(h).taken_by(length(h)); }

  /// Which heads share a table, by how many tables there are.
  placed_tables shared(const page_tables& t) const {
    const std::ptrdiff_t one = capacity() / t.slots, stride = t.stride == 0 ? one : t.stride;
    expects(stride >= one, "paged_cache: expected a stride of at least ", one, " pages, got ",
            stride);
    const index_t per_request = requests(), per_layer = layers() * per_request;
    const auto size = static_cast<std::ptrdiff_t>(t.pages.size());
    placed_tables placed{{t.pages.data(), t.slots}, stride, 1, heads()};
    for (const index_t count : {per_layer, per_request}) {
      if (size == count * stride) {
        placed.heads_each = kv_heads(), placed.count = count;
      }
    }
    expects(size == placed.count * stride, "paged_cache: expected ", per_request, " (requests), ",
            per_layer, " (layers, requests) or ", heads(),
            " (layers, requests, KV heads) tables of ", stride, " pages, got ", size, " entries");
    return placed;
  }

  page_counts counts_;  // none where tables cannot meet
};

}  // namespace kvmeld::inline v0
