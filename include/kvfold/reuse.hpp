/// Heads that are used again: by the next request (`clear`), by a fork (`copy`), in less memory
/// (`shrink`). Cache and state change together.
#pragma once

#include "kvfold/memory/cache.hpp"
#include "kvfold/state.hpp"

namespace kvfold {

/// A head that can be emptied and refilled: the views of `cache`, `strided_view` and `paged_view`.
template <class H>
concept restorable_head = kv_head<H> && requires(const H& head) {
  head.restore(index_t{}, index_t{});
};

/// Empties one head and its state: the next token is at position 0. Nothing is allocated or freed;
/// the pages of a head in pages stay in its table.
void clear(const restorable_head auto& head, head_state& state) {
  head.restore(0, 0);
  state.clear();
}

/// Empties head `h` of `kv`, as when a request has ended. Refused: a head that is not there.
void clear(kv_cache auto& kv, state& state, index_t h) {
  expects(state.heads() == kv.heads(), "clear: a state of ", kv.heads(), " heads expected, ",
          state.heads(), " came");
  expects(h >= 0 && h < kv.heads(), "clear: a head of 0 to ", kv.heads() - 1, " expected, ", h,
          " came");
  clear(kv.head(h), state[h]);
}

/// Makes `to` what `from` is: rows, log-mass, positions, lengths, state. Nothing is allocated.
///
/// A row that lies at the same place in both heads is not copied, as where page tables share a
/// prefix. Heads that share rows overwrite one another when they are compressed: give one of them
/// pages of its own before.
/// Refused, with nothing changed: another dim, too few slots (`no_capacity`), pages that the table
/// of `to` lacks (`no_page`), a state of another kind.
void copy(const kv_head auto& from, const head_state& from_state, const restorable_head auto& to,
          head_state& to_state) {
  static_assert(std::same_as<typename std::remove_cvref_t<decltype(from)>::scalar,
                             typename std::remove_cvref_t<decltype(to)>::scalar>,
                "kvfold: copy needs heads of the same scalar");
  expects(from.dim() == to.dim(), "copy: a head of dim ", from.dim(), " expected, ", to.dim(),
          " came");
  expects(errc::no_capacity, from.length() <= to.capacity(), "copy: a head of at least ",
          from.length(), " slots expected, ", to.capacity(), " came");
  detail::expect_pages(to, 0, from.length());
  to_state.copy(from_state);  // refuses before it changes anything
  detail::copy_slots(from, to);
}

/// Makes head `to` of `kv` what head `from` is, as for a beam or a request that shares a prompt.
void copy(kv_cache auto& kv, state& state, index_t from, index_t to) {
  expects(state.heads() == kv.heads(), "copy: a state of ", kv.heads(), " heads expected, ",
          state.heads(), " came");
  for (const index_t h : {from, to}) {
    expects(h >= 0 && h < kv.heads(), "copy: heads of 0 to ", kv.heads() - 1, " expected, ", h,
            " came");
  }
  if (from != to) {
    copy(kv.head(from), state[from], kv.head(to), state[to]);
  }
}

/// Gives memory back: `capacity` slots a head from here on, as after a prompt was compressed. Old
/// and new memory are held together while rows move. Views of heads that were taken before are
/// invalid afterwards, and scratch grows again at its next use. A policy's memory keeps its layout,
/// and so its size.
/// Refused, with nothing changed: more slots than there are, fewer than a head holds
/// (`no_capacity`).
template <storage_scalar Scalar>
void shrink(cache<Scalar>& kv, state& state, index_t capacity) {
  expects(state.heads() == kv.heads(), "shrink: a state of ", kv.heads(), " heads expected, ",
          state.heads(), " came");
  for (index_t h = 0; h < kv.heads(); ++h) {
    expects(errc::no_capacity, state[h].length() <= capacity, "shrink: a capacity of at least ",
            state[h].length(), " slots expected, ", capacity, " came");
  }
  kv.shrink(capacity);
  state.shrink(capacity);
}

}  // namespace kvfold
