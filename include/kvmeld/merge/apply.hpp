// SPDX-License-Identifier: MIT
/// Carrying out a plan: moves keys, values, log-mass, positions and the state's columns together.
#pragma once

#include <algorithm>  // std::any_of
#include <cstdint>    // std::uintptr_t

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/merge/plan.hpp"

namespace kvmeld::inline v0 {
namespace merge {

/// Moves all that a slot has in addition to its rows: log-mass, position, the state's numbers.
inline void move_metadata(const head_ref& head, head_state& state, index_t to, index_t from) {
  head.log_mass(to) = head.log_mass(from);
  head.position(to) = head.position(from);
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    const auto column = state.column(c);
    column[as_size(to)] = column[as_size(from)];
  }
}
/// ... everything a slot is.
inline void move_slot(const head_ref& head, head_state& state, index_t to, index_t from) {
  detail::copy_row(head.held_key(to), head.held_key(from), head.dim());
  detail::copy_row(head.held_value(to), head.held_value(from), head.own_value_dim());
  move_metadata(head, state, to, from);
}

/// Makes a row's anchor what its sources and corrections say, but for its log-mass. Numbers that
/// would stay as they are are not written.
inline void merge_into_anchor(const head_ref& head, head_state& state,
                              std::span<const merge_source> sources, std::span<const float> delta_k,
                              std::span<const float> delta_v) {
  const auto merge = [&](index_t dim, float merge_source::*weight, std::span<const float> delta,
                         auto row_of) {
    const auto others = sources.subspan(1);
    if (sources.front().*weight != 1.0F ||
        std::any_of(others.begin(), others.end(),
                    [&](const merge_source& e) { return e.*weight != 0.0F; }) ||
        std::any_of(delta.begin(), delta.end(), [](float x) { return x != 0.0F; })) {
      merge_rows(dim, sources, weight, delta, row_of);
    }
  };
  merge(head.dim(), &merge_source::key_weight, delta_k, [&](index_t s) { return head.key(s); });
  merge(head.own_value_dim(), &merge_source::value_weight, delta_v,
        [&](index_t s) { return head.value(s); });
  const auto anchor = as_size(sources.front().source);
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    const auto column = state.column(c);
    for (const merge_source& e : sources.subspan(1)) {
      column[anchor] =
          detail::reduced_stat(state.reduce(c), column[anchor], column[as_size(e.source)]);
    }
  }
}

/// Have two rows a byte in common? Mostly known by their ends; they may interleave.
inline bool overlap(const row<any_scalar>& a, index_t dim_a, const row<any_scalar>& b,
                    index_t dim_b) {
  const auto begin = [](const row<any_scalar>& x, index_t i) {
    return reinterpret_cast<std::uintptr_t>(x.data) + as_size(i) * as_size(x.step);
  };
  const auto end = [&](const row<any_scalar>& x, index_t i) {
    return begin(x, i) + element_bytes(x.type);
  };
  const index_t in_a = row_size(a.type, dim_a), in_b = row_size(b.type, dim_b);
  const bool apart = end(a, in_a - 1) <= begin(b, 0) || end(b, in_b - 1) <= begin(a, 0);
  for (index_t i = 0, k = 0; !apart && i < in_a && k < in_b;) {
    const bool before = end(a, i) <= begin(b, k);
    if (!before && end(b, k) > begin(a, i)) {
      return true;
    }
    before ? ++i : ++k;
  }
  return false;
}

/// Refuses to merge `sources` where values lie in keys and the merged key would be overwritten; in
/// one memory, where keys and values would not be merged alike, or corrected.
inline void expect_mergeable(const head_ref& head, std::span<const merge_source> sources,
                             bool corrected) {
  const index_t s = sources.front().source;
  if (head.one_memory()) {
    for (const merge_source& e : sources) {
      expects(e.key_weight == e.value_weight,
              "apply: expected one weight for key and value, which are in one memory, got ",
              e.key_weight, " and ", e.value_weight, " for slot ", e.source);
    }
    expects(!corrected,
            "apply: expected no correction of keys and values in one memory, got one of slot ", s);
    return;
  }
  expects(!overlap(head.key(s), head.dim(), head.value(s), head.value_dim()),
          "apply: expected keys and values in memory of their own where slots are merged, got "
          "overlapping rows of slot ",
          s);
}

/// Throws unless `plan` obeys its laws and fits `head` and `state`; changes nothing.
inline void expect_applies(const merge_plan& plan, const head_ref& head, const head_state& state) {
  expects(plan.length() == head.length(), "apply: expected a plan of ", head.length(),
          " slots, got ", plan.length());
  const auto expect = [](const char* what, index_t dim, index_t got) {
    expects(got == 0 || got == dim, "apply: expected a ", what, " correction of dim ", dim,
            ", got ", got);
  };
  expect("key", head.dim(), plan.key_dim()), expect("value", head.value_dim(), plan.value_dim());
  const bool rotated = head.rotates_values();
  expects(plan.value_dim() == 0 || plan.for_rotated_values().value_or(rotated) == rotated,
          "apply: expected corrections of values held ", rotated ? "rotated" : "un-rotated",
          ", got those of ", rotated ? "un-rotated" : "rotated", " ones");
  check(plan);
  state.expect_capacity(head.length());
  plan.each_changed_row([&](index_t r) {
    expect_mergeable(head, plan.row(r),
                     !plan.key_correction(r).empty() || !plan.value_correction(r).empty());
  });
}

/// Carries out a plan that `expect_applies` accepts.
inline void carry_out(const merge_plan& plan, const head_ref& head, head_state& state) {
  state.extend(head.length());
  plan.each_changed_row([&](index_t r) {
    merge_into_anchor(head, state, plan.row(r), plan.key_correction(r), plan.value_correction(r));
  });
  for (index_t r = 0; r < plan.rows(); ++r) {
    head.log_mass(plan.anchor(r)) = plan.log_mass(r);
  }
  const auto stays = [&](index_t r) { return plan.anchor(r) < plan.rows(); };
  index_t staying = 0, hole = 0;  // rows whose anchors are below `hole`
  for (index_t r = 0; r < plan.rows(); ++r) {
    if (stays(r)) {
      continue;
    }
    for (; stays(staying) && plan.anchor(staying) == hole; ++hole) {
      ++staying;
    }
    move_slot(head, state, hole++, plan.anchor(r));
  }
  head.truncate(plan.rows());
  state.truncate(plan.rows());
}

}  // namespace merge

/// Makes `head` what `plan` says, in place and without scratch: first every row is merged into its
/// anchor's slot, which no other row reads. Then the rows whose anchors lie at `plan.rows()` or
/// beyond move into the slots that are free below, in ascending order; all others stay where they
/// are. So a plan for one slot less moves the last slot into the freed one, in O(dim).
/// A row that is one unchanged slot keeps its bytes, as do rows whose correction is 0. Refused,
/// with nothing changed: a plan that breaks its laws (`check`), or is for another length or dim;
/// merging where values lie in the memory of keys.
inline void apply(const merge_plan& plan, const head_ref& head, head_state& state) {
  merge::expect_applies(plan, head, state);
  merge::carry_out(plan, head, state);
}

/// The same plan on a second cache, which no policy keeps a state for: a draft model's, or the same
/// rows in another storage. Refused too: corrections of values where one of the two storages holds
/// them rotated.
inline void apply(const merge_plan& plan, const head_ref& head) {
  head_state none({}, 0, head.length());
  apply(plan, head, none);
}

}  // namespace kvmeld::inline v0
