/// Carrying out a plan: moves keys, values, log-mass, positions and the state's columns together.
#pragma once

#include <algorithm>  // std::min

#include "kvfold/memory/convert.hpp"
#include "kvfold/merge/plan.hpp"
#include "kvfold/state.hpp"
#include "kvfold/memory/tile.hpp"

namespace kvfold {

/// A plan that takes one slot away, for decode: `leaving` goes, its key and value weighted into
/// `into` (or nowhere), and the newest slot takes its place. Its value may also be shared by the
/// `heirs` slots that follow it, up to position `last_heir`: each takes 1/`heirs` of it. No other
/// row is touched.
struct departure {
  static constexpr index_t nowhere = -1;

  index_t leaving = nowhere;                                    ///< `nowhere`: all stay
  index_t into = nowhere;                                       ///< `nowhere`: what leaves is gone
  float stay_weight = 1;                                        ///< of `into`'s own value, and key
  float leave_weight = 0;                                       ///< of the leaving ones
  float log_mass = 0;                                           ///< of `into` afterwards
  float stay_key_weight = no_note, leave_key_weight = no_note;  ///< NaN: as the values'
  float note = no_note;                                         ///< for the policy's own `carry`
  index_t heirs = 0;                                            ///< who share the leaving value
  index_t last_heir = nowhere;                                  ///< the position of the last
};

namespace detail {

/// `x ← Σ weight · row + delta`, in float, element by element: the sources may include `x` itself.
template <class Scalar, class RowOf>
void fold_rows(row<Scalar> x, index_t dim, std::span<const edge> edges, float edge::*weight,
               std::span<const float> delta, RowOf row_of) {
  constexpr index_t chunk = 64;
  float sum[chunk], part[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    for (index_t i = 0; i < n; ++i) {
      sum[i] = delta.empty() ? 0.0F : delta[static_cast<std::size_t>(begin + i)];
    }
    for (const edge& e : edges) {
      const row<Scalar> y = row_of(e.source);
      to_floats(row<Scalar>{y.data + begin * y.step, y.step}, n, part);
      const float w = e.*weight;
      for (index_t i = 0; i < n; ++i) {
        sum[i] += w * part[i];
      }
    }
    for (index_t i = 0; i < n; ++i) {
      x[begin + i] = static_cast<Scalar>(sum[i]);
    }
  }
}

template <class Scalar>
void copy_row(row<Scalar> to, row<Scalar> from, index_t dim) {
  if (to.step == 1 && from.step == 1) {
    std::copy_n(from.data, dim, to.data);
    return;
  }
  for (index_t i = 0; i < dim; ++i) {
    to[i] = from[i];
  }
}

/// Moves everything a slot is: rows, log-mass, position, columns.
void move_slot(const slot_rows auto& head, head_state& state, index_t to, index_t from) {
  copy_row(head.key(to), head.key(from), head.dim());
  copy_row(head.value(to), head.value(from), head.dim());
  head.log_mass(to) = head.log_mass(from);
  head.position(to) = head.position(from);
  for (index_t c = 0; c < state.columns(); ++c) {
    const auto column = state.column(c);
    column[static_cast<std::size_t>(to)] = column[static_cast<std::size_t>(from)];
  }
}

}  // namespace detail

/// Makes `head` what `plan` says, in place and without scratch: first every row is folded into its
/// anchor's slot, which no other row reads, then the anchors move down in order.
/// A row that is one unchanged slot keeps its bytes, as do rows whose correction is 0. Refused,
/// with nothing changed: a plan that breaks its laws (`check`), or is for another length or dim.
void apply(const merge_plan& plan, const slot_rows auto& head, head_state& state) {
  using detail::fold_rows;
  expects(plan.length() == head.length(), "apply: a plan of ", head.length(), " slots expected, ",
          plan.length(), " came");
  expects(!plan.has_correction() || plan.dim() == head.dim(), "apply: a correction of dim ",
          head.dim(), " expected, ", plan.dim(), " came");
  check(plan);
  state.extend(head.length());
  const auto any = [](std::span<const float> delta) {
    return std::ranges::any_of(delta, [](float x) { return x != 0.0F; });
  };
  for (index_t r = 0; r < plan.rows(); ++r) {
    const auto edges = plan.row(r);
    const index_t anchor = edges.front().source;
    const bool alone = edges.size() == 1;
    const auto delta_k = plan.key_correction(r), delta_v = plan.value_correction(r);
    if (!alone || edges.front().key_weight != 1.0F || any(delta_k)) {
      fold_rows(head.key(anchor), head.dim(), edges, &edge::key_weight, delta_k,
                [&](index_t s) { return head.key(s); });
    }
    if (!alone || edges.front().value_weight != 1.0F || any(delta_v)) {
      fold_rows(head.value(anchor), head.dim(), edges, &edge::value_weight, delta_v,
                [&](index_t s) { return head.value(s); });
    }
    head.log_mass(anchor) = plan.log_mass(r);
    for (index_t c = 0; c < state.columns(); ++c) {
      const auto column = state.column(c);
      float& x = column[static_cast<std::size_t>(anchor)];
      for (const edge& e : edges.subspan(1)) {
        x = detail::folded(state.fold(c), x, column[static_cast<std::size_t>(e.source)]);
      }
    }
  }
  for (index_t r = 0; r < plan.rows(); ++r) {
    if (const index_t anchor = plan.anchor(r); anchor != r) {
      detail::move_slot(head, state, r, anchor);
    }
  }
  head.truncate(plan.rows());
  state.truncate(plan.rows());
}

namespace detail {

/// The value of the slot that leaves goes in equal parts to those behind it.
void share_value(const departure& d, const slot_rows auto& head) {
  const index_t from = head.position(d.leaving);
  float share[tile_room];
  const auto dim = static_cast<std::size_t>(head.dim());
  to_floats(head.value(d.leaving), head.dim(), share);
  for (float& x : std::span(share, dim)) {
    x /= static_cast<float>(d.heirs);
  }
  for (index_t s = 0; s < head.length(); ++s) {
    if (head.position(s) > from && head.position(s) <= d.last_heir) {
      const edge own[] = {{s}};
      fold_rows(head.value(s), head.dim(), own, &edge::value_weight, std::span(share, dim),
                [&](index_t r) { return head.value(r); });
    }
  }
}

}  // namespace detail

/// Carries out a departure: O(dim), no compaction; the last slot takes the freed one.
void apply(const departure& d, const slot_rows auto& head, head_state& state) {
  using detail::fold_rows;
  if (d.leaving == departure::nowhere) {
    return;
  }
  expects(d.leaving >= 0 && d.leaving < head.length(), "departure: a slot of 0 to ",
          head.length() - 1, " expected, ", d.leaving, " came");
  expects(d.into >= departure::nowhere && d.into < head.length() && d.into != d.leaving,
          "departure: another slot (or nowhere) to go into expected, ", d.into, " came");
  state.extend(head.length());
  if (d.into != departure::nowhere) {
    const auto of_key = [](float key, float value) { return std::isnan(key) ? value : key; };
    const edge edges[] = {{d.into, of_key(d.stay_key_weight, d.stay_weight), d.stay_weight},
                          {d.leaving, of_key(d.leave_key_weight, d.leave_weight), d.leave_weight}};
    fold_rows(head.key(d.into), head.dim(), edges, &edge::key_weight, {},
              [&](index_t s) { return head.key(s); });
    fold_rows(head.value(d.into), head.dim(), edges, &edge::value_weight, {},
              [&](index_t s) { return head.value(s); });
    head.log_mass(d.into) = d.log_mass;
    for (index_t c = 0; c < state.columns(); ++c) {
      const auto column = state.column(c);
      float& x = column[static_cast<std::size_t>(d.into)];
      x = detail::folded(state.fold(c), x, column[static_cast<std::size_t>(d.leaving)]);
    }
  }
  if (d.heirs > 0) {
    detail::share_value(d, head);
  }
  const index_t last = head.length() - 1;
  if (d.leaving != last) {
    detail::move_slot(head, state, d.leaving, last);
  }
  head.truncate(last);
  state.truncate(last);
}

/// The same plan or departure on a second cache, which no policy keeps a state for: a draft
/// model's, or the same rows in another storage.
template <class Change>
void apply(const Change& change, const slot_rows auto& head) {
  head_state none({}, 0, head.length());
  apply(change, head, none);
}

}  // namespace kvfold
