/// A cache in pages: a head's slots lie in blocks of the engine's memory that a table lists.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::ptrdiff_t
#include <span>

#include "kvfold/memory/cache.hpp"

namespace kvfold {
inline namespace v0 {

/// Which pages a head's slots are in: slot `s` of head `h` is in page
/// `pages[h * head + s / slots]`; −1 until the engine has entered one.
struct page_table {
  index_t* pages = nullptr;  ///< [capacity / slots], or `[heads, capacity / slots]`; −1: none yet
  index_t slots = 0;         ///< a page holds
  std::ptrdiff_t head = 0;   ///< stride, head to head; 0: all heads share one table

  static constexpr index_t no_page = -1;

  /// Pages that `length` slots take.
  index_t taken_by(index_t length) const { return length / slots + (length % slots != 0 ? 1 : 0); }
};

/// Where pages lie, strides in elements: element `i` of slot `s` of head `h` is
/// `data[page_of(s) * page + h * head + (s % slots) * row + i * element]`.
template <storage_scalar Scalar>
struct paged_layout {
  Scalar* data = nullptr;
  std::ptrdiff_t page = 0;
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;
  std::ptrdiff_t element = 1;

  /// `[page, slot, head, dim]`, as vLLM's FlashAttention backend keeps keys and values.
  static paged_layout page_slot_head_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const std::ptrdiff_t row = std::ptrdiff_t{heads} * dim;
    return {data, slots * row, dim, row, 1};
  }
  /// `[page, head, slot, dim]`
  static paged_layout page_head_slot_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const std::ptrdiff_t head = std::ptrdiff_t{slots} * dim;
    return {data, heads * head, head, dim, 1};
  }
};

/// One KV head in pages: a `kv_head`. A view, as `head_view` is.
template <storage_scalar Scalar>
class paged_head : public head_base {
 public:
  using scalar = Scalar;

  paged_head(const paged_layout<Scalar>& keys, const paged_layout<Scalar>& values,
             const page_table& table, const slot_metadata& slots, const head_shape& shape)
      : head_base(slots, shape), keys_(keys), values_(values), table_(table) {}

  row<Scalar> key(index_t s) const { return at(keys_, s); }
  row<Scalar> value(index_t s) const { return at(values_, s); }

  /// Refused: slots `from` to `to` − 1 that the table has no pages for.
  void expect_pages(index_t from, index_t to) const {
    for (index_t i = from / table_.slots; i < table_.taken_by(to); ++i) {
      expects(errc::no_page, table_.pages[i] >= 0, "paged_view: a page for slot ",
              std::max(from, i * table_.slots), " expected, ", table_.pages[i], " came");
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
    return {*this,
            scalar_type_of<Scalar>,
            bytes_of(keys_),
            bytes_of(values_),
            {table_.pages, table_.slots}};
  }

 private:
  static head_ref::plane bytes_of(const paged_layout<Scalar>& l) {
    constexpr std::ptrdiff_t size = sizeof(Scalar);
    return {reinterpret_cast<std::byte*>(l.data), l.row * size, l.element, l.page * size};
  }
  row<Scalar> at(const paged_layout<Scalar>& l, index_t s) const {
    const std::ptrdiff_t page = table_.pages[s / table_.slots];
    return {l.data + page * l.page + s % table_.slots * l.row, l.element};
  }

  paged_layout<Scalar> keys_, values_;
  page_table table_;
};

static_assert(kv_head<paged_head<float>>);

/// A `kv_cache` over an engine's pages; log-mass, positions and lengths are kept here. The engine
/// enters a page in the table before a slot needs it. Movable, not copyable, as `strided_view`.
template <storage_scalar Scalar>
class paged_view {
 public:
  using scalar = Scalar;

  paged_view(const cache_shape& shape, paged_layout<Scalar> keys, paged_layout<Scalar> values,
             page_table table)
      : slots_(shape), keys_(keys), values_(values), table_(table) {
    expects(keys.data != nullptr && values.data != nullptr && table.pages != nullptr,
            "paged_view: keys, values and a table expected, null came");
    expects(table.slots > 0 && shape.capacity % table.slots == 0,
            "paged_view: a capacity of whole pages expected, ", shape.capacity,
            " slots in pages of ", table.slots, " came");
    expects(table.head == 0 || table.head >= shape.capacity / table.slots,
            "paged_view: tables of at least ", shape.capacity / table.slots,
            " pages (or one for all heads, stride 0) expected, a stride of ", table.head, " came");
  }

  paged_view(const paged_view&) = delete;
  paged_view& operator=(const paged_view&) = delete;
  paged_view(paged_view&&) noexcept = default;
  paged_view& operator=(paged_view&&) noexcept = default;
  ~paged_view() = default;

  const cache_shape& shape() const { return slots_.shape(); }
  index_t heads() const { return shape().heads; }

  paged_head<Scalar> head(index_t h) {
    auto keys = keys_, values = values_;
    keys.data += h * keys.head, values.data += h * values.head;
    return {keys, values, table(h), slots_.of(h), slots_.extent()};
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
  paged_layout<Scalar> keys_, values_;
  page_table table_;
};

}  // namespace v0
}  // namespace kvfold
