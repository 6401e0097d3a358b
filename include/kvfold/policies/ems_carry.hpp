/// How EMS's table follows a plan.
#pragma once

#include "kvfold/policies/ems_table.hpp"
#include "kvfold/select.hpp"

namespace kvfold {

namespace detail {

/// What becomes of a slot's own token, in a plan's marks: `check` leaves the first two.
enum ems_centre : char { gone, taken_along, left_behind };

/// Of the tokens that share entries, or will, the one of least `score` leaves; among equals the one
/// later in the table, which is in order of rows and of joining.
template <class Score>
void make_room(const ems_table<head_state>& tokens, const merge_plan& change, Score score) {
  constexpr index_t none = ems_table<head_state>::none;
  const auto centre = [&](index_t s) -> char& {
    return change.marks()[static_cast<std::size_t>(s)];
  };
  index_t least = none, before = none;  // `before`: in its list; none: a centre
  float lowest = 0;
  const auto compare = [&](index_t token, index_t behind) {
    const float s = rank(score(token));
    if (least == none || s <= lowest) {
      least = token, before = behind, lowest = s;
    }
  };
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const edge& e : change.row(r)) {
      if (e.source != change.anchor(r) && centre(e.source) == taken_along) {
        compare(e.source, none);
      }
      for (index_t t = e.source; tokens.after(t) != none; t = tokens.after(t)) {
        compare(tokens.after(t), t);
      }
    }
  }
  if (before != none) {
    tokens.remove_after(before);
  } else {
    centre(least) = left_behind;
  }
}

}  // namespace detail

/// Joins the lists of tokens as the plan's rows say, before it is applied; slots that go take
/// theirs along. At most `most` tokens share entries afterwards: those of least `score(token)` make
/// room first, so that the table never holds more.
template <class Score>
void carry_tokens(const kv_head auto& head, const ems_table<head_state>& tokens,
                  const merge_plan& change, index_t most, Score score) {
  auto& centre = change.marks();  // as `check` has left them
  index_t joining = -change.rows();
  for (index_t s = 0; s < head.length(); ++s) {
    if (centre[static_cast<std::size_t>(s)] == detail::gone) {
      tokens.remove_sharing(s);
    } else {
      ++joining;
    }
  }
  for (index_t more = tokens.sharing() + joining - most; more > 0; --more) {
    detail::make_room(tokens, change, score);
  }
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const edge& e : change.row(r).subspan(1)) {
      tokens.join(head, change.anchor(r), e.source,
                  centre[static_cast<std::size_t>(e.source)] == detail::taken_along);
    }
  }
}

}  // namespace kvfold
