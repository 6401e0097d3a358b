// SPDX-License-Identifier: MIT
/// Where keys or values lie in device memory, strided or in pages.
#pragma once

#include <cstddef>  // std::ptrdiff_t
#include <cstdint>  // std::uint64_t, std::uintptr_t

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {

/// How many slots a page holds, any number from 1, and the numbers by which slots are divided by
/// it: `s / slots = s · factor >> shift` for all `s` below 2^31 (Granlund and Montgomery 1994).
struct page_slots {
  index_t slots = 1;
  unsigned factor = 1U << 31;
  index_t shift = 31;

  page_slots() = default;
  KVMELD_HD constexpr page_slots(index_t n) : slots(n) {  // NOLINT: `.slots = 16`
    while (n > 1 && (std::int64_t{1} << (shift - 31)) < n) {
      ++shift;
    }
    const auto d = static_cast<std::uint64_t>(n < 1 ? 1 : n);
    factor = n < 1 ? 0U : static_cast<unsigned>(((std::uint64_t{1} << shift) + d - 1) / d);
  }
  KVMELD_HD index_t page_of(index_t s) const {
    return static_cast<index_t>((static_cast<std::uint64_t>(s) * factor) >> shift);
  }
};

/// Rows of one head's keys or values.
template <class Scalar>
struct head_rows {
  Scalar* data;
  std::ptrdiff_t row, page;
  const index_t* table;
  page_slots pages;

  /// Row `s`, contiguous `[dim]`.
  KVMELD_HD Scalar* at(index_t s) const {
    if (table == nullptr) {
      return data + s * row;
    }
    const index_t i = pages.page_of(s);
    return data + table[i] * page + (s - i * pages.slots) * row;
  }
  /// Rows `s[0], s[1], ...`, whose pages are looked up side by side.
  template <index_t N>
  KVMELD_HD void at(const index_t (&s)[N], Scalar* (&rows)[N]) const {
    if (table == nullptr) {
      KVMELD_UNROLL
      for (index_t u = 0; u < N; ++u) {
        rows[u] = data + s[u] * row;
      }
      return;
    }
    index_t found[N];
    KVMELD_UNROLL
    for (index_t u = 0; u < N; ++u) {
      found[u] = table[pages.page_of(s[u])];
    }
    KVMELD_UNROLL
    for (index_t u = 0; u < N; ++u) {
      rows[u] = data + found[u] * page + (s[u] - pages.page_of(s[u]) * pages.slots) * row;
    }
  }
};

/// Where keys (or values) lie, in elements: head `h`, slot `s` at
///
///     strided   data + (h / heads) · sequence + (h % heads) · head + s · row
///     paged     data + (h % heads) · head + page_of(h / heads, s / slots) · page
///                    + (s mod slots) · row
///
/// where `page_of(i, p) = table[i · pages + p]`: vLLM's block table, a row of it for the `heads` KV
/// heads of one sequence (or, with `heads` 1, for each head). Rows are contiguous `[dim]`.
template <class Scalar>
struct plane {
  Scalar* data = nullptr;
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;
  index_t heads = 1 << 30;  ///< KV heads of a sequence; default: no sequences, heads alone
  std::ptrdiff_t sequence = 0;

  const index_t* table = nullptr;  ///< `[sequences, pages]`; null: strided
  index_t pages = 0;
  page_slots slots = {};    ///< of a page, any number from 1
  std::ptrdiff_t page = 0;  ///< page to page

  KVMELD_HD head_rows<Scalar> of(index_t h) const {
    const index_t i = h / heads;
    Scalar* const first = data + (h - i * heads) * head;
    if (table == nullptr) {
      return {first + i * sequence, row, 0, nullptr, {}};
    }
    return {first, row, page, table + std::ptrdiff_t{i} * pages, slots};
  }

  /// Do all rows begin at multiples of 16 bytes? Then they are moved so.
  template <std::size_t Bytes = 16>
  bool aligned() const {
    constexpr auto n = static_cast<std::ptrdiff_t>(Bytes / sizeof(Scalar));
    return reinterpret_cast<std::uintptr_t>(data) % Bytes == 0 && head % n == 0 && row % n == 0 &&
           sequence % n == 0 && page % n == 0;
  }
};

}  // namespace kvmeld::cuda
