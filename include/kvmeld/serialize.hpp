// SPDX-License-Identifier: MIT
/// Saving and loading a compressed cache, so that decoding goes on bit for bit.
#pragma once

#include <istream>
#include <ostream>

#include "kvmeld/compress.hpp"
#include "kvmeld/compress/saved_heads.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// All heads of a cache with their policies and states.
template <class P, class Cache>
struct all_heads {
  const P& policies;
  Cache& kv;
  kvmeld::state& states;

  index_t count() const { return kv.heads(); }
  const auto& policy(index_t h) const { return for_head(policies, h); }
  head_ref head(index_t h) { return kv.head(h); }
  head_state& state(index_t h) { return states[h]; }
};

template <policies P>
void expect_state_of_all(const char* what, const P& p, kv_cache auto& kv, const state& s) {
  expect_per_head(what, "policies", p, kv.heads());
  expects(s.heads() == kv.heads(), what, ": expected a state of ", kv.heads(), " heads, got ",
          s.heads());
  for (index_t h = 0; h < kv.heads(); ++h) {
    expect_state(for_head(p, h), kv.head(h), s[h]);
  }
}

}  // namespace detail

/// Saves all heads: keys, values, log-mass, positions, lengths, and the state that `p` keeps (one
/// policy for all heads, or a span with one per head). The policy's parameters and the budget are
/// the program's, and not saved. Several caches may follow one another in a (binary) stream.
/// Refused: a state that `make_state` would not have made, a stream that fails.
template <policies P>
void save(std::ostream& out, const P& p, kv_cache auto& kv, state& state) {
  detail::expect_state_of_all("save", p, kv, state);
  detail::all_heads<P, std::remove_reference_t<decltype(kv)>> all{p, kv, state};
  detail::save_heads(out, all);
}

/// Loads what `save` saved into a cache of the same shape and the state that `make_state` makes for
/// the same policies; what they held is overwritten. Decoding goes on bit for bit.
/// Refused, with nothing changed: anything but a saved cache, another version, scalar, shape,
/// policy or column layout, lengths that cannot be, an end too early, another checksum.
template <policies P>
void load(std::istream& in, const P& p, kv_cache auto& kv, state& state) {
  detail::expect_state_of_all("load", p, kv, state);
  detail::all_heads<P, std::remove_reference_t<decltype(kv)>> all{p, kv, state};
  detail::load_heads(in, all);
}

}  // namespace v0
}  // namespace kvmeld
