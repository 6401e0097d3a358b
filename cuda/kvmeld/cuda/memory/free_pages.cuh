// SPDX-License-Identifier: MIT
/// Which pages calls have freed, for the host's pool.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda {

namespace detail {

/// Pages that the longest of a sequence's heads takes.
template <class Scalar>
struct count_pages {
  static constexpr index_t threads = 32;
  struct shared_memory {};

  cache_view<Scalar> cache;
  index_t ahead;
  index_t* pages;

  /// Grid: sequences.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const plane<Scalar>& rows = cache.keys;
    const index_t first = place_of_block() * rows.heads, rest = cache.heads - first;
    index_t most = 0;
    for (index_t h = lane(); h < rows.heads && h < rest; h += 32) {
      const index_t n = cache.length[first + h];
      most = n > most ? n : most;
    }
    const index_t used = rows.slots.page_of(reduce_max(most) + ahead + rows.slots.slots - 1);
    if (lane() == 0) {
      pages[place_of_block()] = used < rows.pages ? used : rows.pages;
    }
  }
};

}  // namespace detail

/// How many pages each sequence's table has in use, the first ones: those after them are free. Into
/// `pages [sequences]` on the device and `host [sequences]`, pinned; the host reads these when
/// `is_done(done)`, and nothing waits. `ahead`: tokens of each head that calls may append before
/// the host reads the next counts, not these; their pages count as in use. One launch and one copy.
/// Refused: keys or values that are not in pages, or in pages or sequences of other sizes than the
/// other's.
template <class Scalar>
void free_pages(const cache_view<Scalar>& cache, index_t ahead, index_t* pages, index_t* host,
                event done, stream stream) {
  check(cache);
  const auto &k = cache.keys, &v = cache.values;
  expects(k.table != nullptr && v.table != nullptr && k.slots.slots == v.slots.slots &&
              k.heads == v.heads && k.pages == v.pages,
          "cuda free_pages: expected keys and values in pages of one size, got others");
  expects(ahead >= 0 && ahead <= max_capacity && pages != nullptr && host != nullptr,
          "cuda free_pages: expected 0 to ", max_capacity, " tokens ahead, and counts on both ",
          "sides, got ", ahead);
  const unsigned sequences = blocks_of(cache.heads, k.heads);
  launch(detail::count_pages<Scalar>{cache.with_active(nullptr, 0), ahead, pages}, {sequences},
         stream);
  copy_to_host(host, pages, sequences, done, stream);
}

}  // namespace kvmeld::cuda
