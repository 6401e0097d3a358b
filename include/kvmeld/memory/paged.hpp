/// A cache in pages: a head's slots lie in blocks of the engine's memory that a table lists.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::ptrdiff_t
#include <span>

#include "kvmeld/memory/cache.hpp"

namespace kvmeld {
inline namespace v0 {

/// One KV head in pages: a `kv_head`. A view, as `head_view` is.
template <storage_scalar Scalar>
class paged_head : public head_base {
 public:
  using scalar = Scalar;

  paged_head(const layout<Scalar>& keys, const layout<Scalar>& values, const page_table& table,
             const slot_metadata& slots, index_t capacity, const attention_spec& spec)
      : head_base(slots, capacity, spec), keys_(keys), values_(values), table_(table) {}

  row<Scalar> key(index_t s) const { return at(keys_, s); }
  row<Scalar> value(index_t s) const { return at(values_, s); }

  /// Refused: slots `from` to `to` − 1 that the table has no pages for.
  void expect_pages(index_t from, index_t to) const {
    for (index_t i = from / table_.slots; i < table_.taken_by(to); ++i) {
      expects(errc::no_page, table_.pages[i] >= 0, "paged_view: expected a page for slot ",
              std::max(from, i * table_.slots), ", got ", table_.pages[i]);
    }
  }

  /// Appends one token `[dim]`. Refused: no page for it in the table.
  template <class T>
  void push(const T* key, const T* value) const {
    expect_pages(length(), std::min(length() + 1, capacity()));
    const index_t s = push_metadata();
    detail::store_row(key, this->key(s), dim());
    detail::store_row(value, this->value(s), dim());
  }

  using own_type = paged_head;
  head_ref ref() const {
    return {*this, scalar_type_of<Scalar>, keys_.bytes(), values_.bytes(), table_};
  }

 private:
  row<Scalar> at(const layout<Scalar>& l, index_t s) const {
    return {l.slot(s, table_), l.element};
  }

  layout<Scalar> keys_, values_;
  page_table table_;
};

static_assert(kv_head<paged_head<float>>);

/// A `kv_cache` over an engine's pages; log-mass, positions and lengths are kept here. The engine
/// enters a page in the table before a slot needs it. Movable, not copyable, as `strided_view`.
template <storage_scalar Scalar>
class paged_view {
 public:
  using scalar = Scalar;

  paged_view(const cache_shape& shape, layout<Scalar> keys, layout<Scalar> values, page_table table)
      : slots_(detail::in_whole_blocks<Scalar>(shape)),
        keys_(keys),
        values_(values),
        table_(table) {
    expects(keys.data != nullptr && values.data != nullptr && table.pages != nullptr,
            "paged_view: expected keys, values and a table, got null");
    expects((keys.element == 1 && values.element == 1) || plain_scalar<Scalar>,
            "paged_view: expected rows of blocks with element strides of 1, got ", keys.element,
            " and ", values.element);
    expects(table.slots > 0 && shape.capacity % table.slots == 0,
            "paged_view: expected a capacity in whole pages, got ", shape.capacity,
            " slots in pages of ", table.slots);
    expects(table.head == 0 || table.head >= shape.capacity / table.slots,
            "paged_view: expected a head stride of at least ", shape.capacity / table.slots,
            " pages (or 0: one table for all heads), got ", table.head);
  }

  paged_view(const paged_view&) = delete;
  paged_view& operator=(const paged_view&) = delete;
  paged_view(paged_view&&) noexcept = default;
  paged_view& operator=(paged_view&&) noexcept = default;
  ~paged_view() = default;

  const cache_shape& shape() const { return slots_.shape(); }
  index_t heads() const { return shape().heads; }

  paged_head<Scalar> head(index_t h) {
    return {keys_.of(h), values_.of(h), table(h), slots_.of(h), shape().capacity, slots_.spec()};
  }

  template <class T>
  void append(index_t h, std::span<const T> keys, std::span<const T> values) {
    append_rows(head(h), keys, values);
  }

  /// Takes in the `tokens` rows that follow the slots in use of head `h`: the engine wrote them.
  void adopt(index_t h, index_t tokens) {
    const auto own = head(h);
    if (tokens > 0 && tokens <= own.capacity() - own.length()) {
      own.expect_pages(own.length(), own.length() + tokens);
    }
    slots_.adopt(h, tokens);
  }

  /// Pages that the table of head `h` has for slots in use, of this head and of those that share
  /// it.
  index_t pages(index_t h) {
    index_t most = 0;
    for (index_t i = 0; i < heads(); ++i) {
      most = std::max(most, i == h || table_.head == 0 ? table_.taken_by(head(i).length()) : 0);
    }
    return most;
  }
  /// The table's entries behind those: after a compression, the pages that it has freed, and what
  /// was −1 before.
  std::span<const index_t> free_pages(index_t h) {
    const std::span<const index_t> all(table(h).pages,
                                       static_cast<std::size_t>(shape().capacity / table_.slots));
    return all.subspan(static_cast<std::size_t>(pages(h)));
  }

  /// The pages of head `h`.
  page_table table(index_t h) const {
    auto own = table_;
    own.pages += h * own.head;
    return own;
  }

 private:
  cache_metadata slots_;
  layout<Scalar> keys_, values_;
  page_table table_;
};

}  // namespace v0
}  // namespace kvmeld
