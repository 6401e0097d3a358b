// SPDX-License-Identifier: MIT
/// A cache in pages: a head's slots lie in blocks of the engine's memory that a table lists.
#pragma once

#include <algorithm>  // std::max
#include <span>

#include "kvmeld/memory/cache_base.hpp"

namespace kvmeld {
inline namespace v0 {

/// A `kv_cache` over an engine's pages; log-mass, positions and lengths are kept here. The engine
/// enters a page in the table before a slot needs it.
///
///     kvmeld::paged_cache kv(spec, {.layers = 32, .requests = 8, .capacity = 4096},
///                            kvmeld::rows(k, kvmeld::layout::pages_nhd),
///                            kvmeld::rows(v, kvmeld::layout::pages_nhd),
///                            {.pages = block_tables, .slots = 16});
///
/// Movable, not copyable, as `strided_cache`. Refused: as there, a capacity of no whole pages,
/// tables of another size.
class paged_cache : public cache_base {
 public:
  paged_cache(const attention_spec& spec, const cache_extents& extents, const rows& keys,
              const rows& values, const page_tables& tables)
      : paged_cache(std::span(&spec, 1), extents, keys, values, tables) {}
  paged_cache(std::span<const attention_spec> specs, const cache_extents& extents, const rows& keys,
              const rows& values, const page_tables& tables)
      : cache_base(checked(specs, extents), extents, keys.type()) {
    expects(errc::unsupported, keys.type() == values.type(),
            "paged_cache: expected keys and values of one storage (not carried out by this "
            "version), got two");
    expects(tables.pages.data() != nullptr, "paged_cache: expected page tables, got null");
    expects(tables.slots > 0 && capacity() % tables.slots == 0,
            "paged_cache: expected a capacity of whole pages, got ", capacity(),
            " slots in pages of ", tables.slots);
    placed_tables placed = shared(tables);
    index_t pages_of_keys = 0, pages_of_values = 0;
    const bool own_tables = kv_heads() > 1 && placed.heads_each == 1;
    const placed_rows of_keys = detail::place_rows("paged_cache", "keys", keys, spec(), extents,
                                                   tables.slots, pages_of_keys, own_tables);
    set_rows(of_keys, detail::place_rows("paged_cache", "values", values, spec(), extents,
                                         tables.slots, pages_of_values, own_tables));
    placed.first.limit = std::min(pages_of_keys, pages_of_values);
    set_tables(placed);
  }

  paged_cache(const paged_cache&) = delete;
  paged_cache& operator=(const paged_cache&) = delete;
  paged_cache(paged_cache&&) noexcept = default;
  paged_cache& operator=(paged_cache&&) noexcept = default;
  ~paged_cache() = default;

  using cache_base::table;

  /// Do two heads share a page table?
  bool share_table(index_t a, index_t b) const { return table(a).pages == table(b).pages; }
  /// Pages that the table of head `h` has for slots in use, of this head and of those that share
  /// it.
  index_t pages(index_t h) {
    index_t most = 0;
    for (index_t i = 0; i < heads(); ++i) {
      most = std::max(most, share_table(i, h) ? table(i).taken_by(head(i).length()) : 0);
    }
    return most;
  }
  /// The table's entries after those: after a compression, the pages that it has freed, and what
  /// was −1 before.
  std::span<const index_t> free_pages(index_t h) {
    const page_table own = table(h);
    const std::span<const index_t> all(own.pages, static_cast<std::size_t>(capacity() / own.slots));
    return all.subspan(static_cast<std::size_t>(pages(h)));
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

 private:
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
};

}  // namespace v0
}  // namespace kvmeld
