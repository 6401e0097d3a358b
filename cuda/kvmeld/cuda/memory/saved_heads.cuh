// SPDX-License-Identifier: MIT
/// Heads of requests that wait: all that calls know of them, but for their rows, in an engine's
/// pages.
#pragma once

#include <cstdint>  // std::uint32_t
#include <cstring>  // std::memcpy

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda {

/// Where saved heads lie: word `i` of the head at place `p` of a call's list is
/// `pages.of(p).at(i)`, so `slots` is the words that a page holds of a head, and `row` 1. The pages
/// may be those of the engine's pool: `{.data = pool, .head = words, .row = 1, .heads = kv_heads,
/// .table = table, .pages = columns, .slots = words, .page = page}` shares one among the KV heads
/// of a layer.
using saved_pages = plane<std::uint32_t>;

namespace detail {

/// Between a head's dense numbers and its words:
///
///     length, next position, words of memory    one each
///     log-mass, positions, columns              as many of each, one after the other, as slots
///     memory                                    up to its last number that is not 0
template <class Scalar, bool Saves>
struct saved_head_words {
  static constexpr index_t threads = 512, header = 3;
  struct shared_memory {
    of_warps<index_t, threads> most;
  };

  cache_view<Scalar> cache;
  state_view state;
  saved_pages pages;
  index_t* words;

  /// Grid: heads.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), place = place_of_block();
    const auto page_words = pages.of(place);
    sizes n{};
    if constexpr (Saves) {
      n = {cache.length[h], cache.next_position[h], memory_in_use(shared, h)};
    } else if (has_pages(shared, header)) {
      n = {load(page_words.at(0)), load(page_words.at(1)), load(page_words.at(2))};
    } else {
      n.slots = -1;
    }
    const bool fits = n.slots >= 0 && n.slots <= cache.capacity && n.next_position >= n.slots &&
                      n.memory >= 0 && n.memory <= state.floats;
    const index_t all = fits ? header + n.slots * (2 + state.count) + n.memory : 0;
    const bool moves = has_pages(shared, all) && fits;
    if (thread_index() == 0) {
      words[place] = moves ? all : -1;
    }
    if (moves) {
      move(page_words, h, n);
    }
  }

 private:
  struct sizes {
    index_t slots, next_position, memory;
  };

  KVMELD_DEVICE static index_t load(const void* word) {
    index_t x = 0;
    std::memcpy(&x, word, sizeof x);
    return x;
  }
  template <class T>
  KVMELD_DEVICE static void move(std::uint32_t* word, T& x) {
    static_assert(sizeof x == sizeof *word);
    if constexpr (Saves) {
      std::memcpy(word, &x, sizeof x);
    } else {
      std::memcpy(&x, word, sizeof x);
    }
  }

  /// Numbers of a head's memory up to the last one that is not 0: `clear` leaves zeros.
  KVMELD_DEVICE index_t memory_in_use(shared_memory& shared, index_t h) const {
    index_t end = 0;
    for (index_t i = thread_index(); i < state.floats; i += threads) {
      end = load(state.memory_of(h) + i) != 0 ? i + 1 : end;
    }
    return block_max(shared.most, end);
  }
  /// Has this place pages for so many words?
  KVMELD_DEVICE bool has_pages(shared_memory& shared, index_t count) const {
    const index_t used = count > 0 ? pages.slots.page_of(count - 1) + 1 : 0;
    const auto own = pages.of(place_of_block());
    index_t missing = used > pages.pages ? 1 : 0;
    for (index_t i = thread_index(); i < used && i < pages.pages; i += threads) {
      missing = own.table[i] < 0 ? 1 : missing;
    }
    return block_max(shared.most, missing) == 0;
  }

  KVMELD_DEVICE void move(const head_rows<std::uint32_t>& to, index_t h, const sizes& n) const {
    if (thread_index() == 0) {
      index_t memory = n.memory;
      move(to.at(0), cache.length[h]), move(to.at(1), cache.next_position[h]);
      move(to.at(2), memory);
    }
    for (index_t s = thread_index(); s < n.slots; s += threads) {
      move(to.at(header + s), cache.log_mass_of(h)[s]);
      move(to.at(header + n.slots + s), cache.position_of(h)[s]);
      for (index_t c = 0; c < state.count; ++c) {
        move(to.at(header + (2 + c) * n.slots + s), state.column(c, h)[s]);
      }
    }
    const index_t first = header + (2 + state.count) * n.slots;
    for (index_t i = thread_index(); i < (Saves ? n.memory : state.floats); i += threads) {
      if (i < n.memory) {
        move(to.at(first + i), state.memory_of(h)[i]);
      } else {
        state.memory_of(h)[i] = 0;
      }
    }
  }
};

template <bool Saves, class Scalar>
void move_saved(const cache_view<Scalar>& cache, const state_view& state, const saved_pages& pages,
                index_t* words, stream stream, const char* what) {
  using kernel = saved_head_words<Scalar, Saves>;
  check(cache), check(state, cache, 0, static_cast<std::size_t>(state.floats), what);
  expects(pages.data != nullptr && pages.table != nullptr && pages.row == 1 && pages.heads >= 1 &&
              pages.slots.slots >= 1 && pages.pages >= 1 && words != nullptr,
          what,
          ": expected saved_pages with a table, a row of 1, words and pages, and counts, got ",
          "others or null");
  launch(kernel{cache, state, pages, words}, {cache.blocks()}, stream);
}

}  // namespace detail

/// Words of 32 bits that a head of `slots` slots takes at most, saved.
inline std::int64_t saved_words(const state_view& state, index_t slots) {
  return detail::saved_head_words<float, true>::header + std::int64_t{slots} * (2 + state.count) +
         state.floats;
}

/// Saves the heads that the call runs into pages: lengths, log-mass, positions and the state, all
/// that later calls read of them but their rows, which stay where they are. The heads may then be
/// other requests'. Into `words [places]`, on the device, how many words each has taken, so that
/// pages after them are free, or −1 where a page is missing (−1 in the table, or too few), or the
/// head has more slots than the capacity, or than it has seen tokens: its pages stay as they were.
/// One launch, which waits for nothing; cost by slots, not by capacity, and the memory is read
/// once.
template <class Scalar>
void save_to_pages(const cache_view<Scalar>& cache, const state_view& state,
                   const saved_pages& pages, index_t* words, stream stream) {
  detail::move_saved<true>(cache, state, pages, words, stream, "cuda save_to_pages");
}

/// Loads what `save_to_pages` saved, of the same policy and dims, into the heads that the call
/// runs, any of the cache: calls go on as they would have. The engine brings their rows: those
/// heads' tables name the pages that the rows are in. `words` as of `save_to_pages`; −1 where pages
/// are missing, or hold what is not saved or finds no room: that head stays as it was. Where the
/// model has sinks, a head's must be the same, of its layer and KV head. One launch.
template <class Scalar>
void load_from_pages(const cache_view<Scalar>& cache, const state_view& state,
                     const saved_pages& pages, index_t* words, stream stream) {
  detail::move_saved<false>(cache, state, pages, words, stream, "cuda load_from_pages");
}

}  // namespace kvmeld::cuda
