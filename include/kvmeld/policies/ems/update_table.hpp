// SPDX-License-Identifier: MIT
/// How EMS's table follows a plan.
#pragma once

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/slot_removal.hpp"
#include "kvmeld/policies/ems/table.hpp"
#include "kvmeld/search/protection.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// What becomes of a slot's own token, by slot.
enum ems_centre : char { evicted, moved, dropped };

/// Of the tokens that share entries, or will, the one of least `score` is dropped; among equals the
/// one later in the table, which is in order of rows and of joining. `each_source(f)` calls
/// `f(slot, mark of one that joins, else null)` in that order.
template <class EachSource, class Score>
void make_room(const ems_table<head_state>& tokens, EachSource each_source, Score score) {
  constexpr index_t none = ems_table<head_state>::none;
  index_t least = none, before = none;  // `before`: in its list; none: a centre
  char* own = nullptr;                  // that centre's mark
  float lowest = 0;
  const auto compare = [&](index_t token, index_t behind, char* mark) {
    const float s = rank(score(token));
    if (least == none || s <= lowest) {
      least = token, before = behind, own = mark, lowest = s;
    }
  };
  each_source([&](index_t source, char* joining) {
    if (joining != nullptr && *joining == moved) {
      compare(source, none, joining);
    }
    for (index_t t = source; tokens.after(t) != none; t = tokens.after(t)) {
      compare(tokens.after(t), t, nullptr);
    }
  });
  if (before != none) {
    tokens.remove_after(before);
  } else {
    *own = dropped;
  }
}

/// Joins the lists of tokens as the plan's rows say, before it is applied; those of evicted slots
/// are dropped. At most `most` tokens share entries afterwards: those of least `score(token)` are
/// dropped first, so that the table never holds more.
template <class Score>
void update_table(const kv_head auto& head, const ems_table<head_state>& tokens,
                  const merge_plan& change, index_t most, Score score, std::vector<char>& centre) {
  centre.assign(static_cast<std::size_t>(change.length()), evicted);
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const merge_source& e : change.row(r)) {
      centre[static_cast<std::size_t>(e.source)] = moved;
    }
  }
  index_t joining = -change.rows();
  for (index_t s = 0; s < head.length(); ++s) {
    if (centre[static_cast<std::size_t>(s)] == evicted) {
      tokens.remove_sharing(s);
    } else {
      ++joining;
    }
  }
  const auto each_source = [&](auto see) {
    for (index_t r = 0; r < change.rows(); ++r) {
      for (const merge_source& e : change.row(r)) {
        char& mark = centre[static_cast<std::size_t>(e.source)];
        see(e.source, e.source != change.anchor(r) ? &mark : nullptr);
      }
    }
  };
  for (index_t more = tokens.sharing() + joining - most; more > 0; --more) {
    make_room(tokens, each_source, score);
  }
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const merge_source& e : change.row(r).subspan(1)) {
      tokens.join(head, change.anchor(r), e.source,
                  centre[static_cast<std::size_t>(e.source)] == moved);
    }
  }
}

/// The same for a removal; `score_of_tokens()` is called only where tokens have to be dropped.
template <class ScoreOf>
void update_table(const kv_head auto& head, const ems_table<head_state>& tokens,
                  const slot_removal& change, index_t most, ScoreOf score_of_tokens) {
  const bool joins = change.into != slot_removal::nowhere;
  char centre = moved;
  if (!joins) {
    tokens.remove_sharing(change.removed);
  }
  if (index_t more = tokens.sharing() + (joins ? 1 : 0) - most; more > 0) {
    const auto score = score_of_tokens();
    const auto each_source = [&](auto see) {
      for (index_t s = 0; s < head.length(); ++s) {
        if (s != change.removed) {
          see(s, static_cast<char*>(nullptr));
        }
        if (s == change.into) {
          see(change.removed, &centre);
        }
      }
    };
    for (; more > 0; --more) {
      make_room(tokens, each_source, score);
    }
  }
  if (joins) {
    tokens.join(head, change.into, change.removed, centre == moved);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
