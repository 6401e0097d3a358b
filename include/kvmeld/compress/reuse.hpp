// SPDX-License-Identifier: MIT
/// A head that is used again: by the next request, by a fork.
#pragma once

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// Empties one head and its state: the next token is at position 0. Nothing is allocated or freed;
/// the pages of a head in pages stay in its table.
inline void clear(const head_ref& head, head_state& state) {
  head.restore(0, 0);
  state.clear();
}

/// Makes `to` what `from` is: rows, log-mass, positions, lengths, state. Nothing is allocated. In
/// another storage every row is rounded once: a prompt compressed in floats can be held in `q8_0`.
/// The capacities may differ, but for `ems`, whose memory is laid out for one.
///
/// A row that lies at the same place in both heads is not copied, as where page tables share a
/// prefix. Heads that share rows overwrite one another when they are compressed: give one of them
/// pages of its own before.
/// Refused, with nothing changed: another dim, too few slots (`no_capacity`), pages that the table
/// of `to` lacks (`no_page`), a state of another kind.
inline void copy(const head_ref& from, const head_state& from_state, const head_ref& to,
                 head_state& to_state) {
  expects(from.dim() == to.dim(), "copy: expected a head of dim ", from.dim(), ", got ", to.dim());
  expects(errc::no_capacity, from.length() <= to.capacity(), "copy: expected a head of at least ",
          from.length(), " slots, got ", to.capacity());
  to.expect_pages(0, from.length());
  to_state.copy(from_state);  // refuses before it changes anything
  detail::copy_slots(from, to);
}

}  // namespace kvmeld::inline v0
