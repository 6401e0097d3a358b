/// Where an engine keeps the keys (or the values) of its heads.
#pragma once

#include <cstddef>  // std::byte, std::ptrdiff_t

#include "kvmeld/config.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld {
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

/// Rows by strides, in elements of `Scalar`: a number each, or a block of numbers. Element `i` of
/// slot `s` of head `h` is
///
///     strided   data[h * head + s * row + i * element]
///     in pages  data[h * head + page_of(s) * page + (s % slots) * row + i * element]
///
/// A layout of `std::byte` has its strides in bytes, the element's too.
template <class Scalar>
struct layout {
  Scalar* data = nullptr;
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;
  std::ptrdiff_t element = 1;
  std::ptrdiff_t page = 0;

  /// `[token, head, dim]`, as llama.cpp keeps keys.
  static layout token_head_dim(Scalar* data, index_t heads, index_t dim) {
    const index_t size = row_size<Scalar>(dim);
    return {data, size, std::ptrdiff_t{heads} * size};
  }
  /// `[head, token, dim]`
  static layout head_token_dim(Scalar* data, index_t capacity, index_t dim) {
    const index_t size = row_size<Scalar>(dim);
    return {data, std::ptrdiff_t{capacity} * size, size};
  }
  /// `[head, dim, token]`: values transposed. Not in blocks.
  static layout head_dim_token(Scalar* data, index_t capacity,
                               index_t dim) requires plain_scalar<Scalar> {
    return {data, std::ptrdiff_t{capacity} * dim, 1, capacity};
  }
  /// `[page, slot, head, dim]`, as vLLM's FlashAttention backend keeps keys and values.
  static layout page_slot_head_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const index_t size = row_size<Scalar>(dim);
    const std::ptrdiff_t row = std::ptrdiff_t{heads} * size;
    return {data, size, row, 1, slots * row};
  }
  /// `[page, head, slot, dim]`
  static layout page_head_slot_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const index_t size = row_size<Scalar>(dim);
    const std::ptrdiff_t head = std::ptrdiff_t{slots} * size;
    return {data, head, size, 1, heads * head};
  }

  /// That of head `h` alone.
  layout of(index_t h) const { return {data + h * head, 0, row, element, page}; }

  layout<std::byte> bytes() const {
    constexpr std::ptrdiff_t size = sizeof(Scalar);
    return {reinterpret_cast<std::byte*>(data), head * size, row * size, element * size,
            page * size};
  }

  /// Slot `s` of the first head; in pages, those of `table`.
  Scalar* slot(index_t s) const { return data + s * row; }
  Scalar* slot(index_t s, const page_table& table) const {
    return data + table.pages[s / table.slots] * page + s % table.slots * row;
  }
};

}  // namespace v0
}  // namespace kvmeld
