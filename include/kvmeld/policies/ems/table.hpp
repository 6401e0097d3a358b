// SPDX-License-Identifier: MIT
/// EMS's look-up table: tokens that share an entry, each with its own norm and scores, and how it
/// follows a plan.
#pragma once

#include <bit>          // std::bit_cast
#include <type_traits>  // std::is_const_v

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// A view of what EMS keeps of every token. The first token of an entry, its centre, has its
/// numbers in the columns of its slot; those that share the entry have theirs in places of the
/// state's flat memory, linked in the order of joining. Apart from the norm they are attention
/// received. A token is named by its slot, or by the capacity plus its place. Links are numbers of
/// places counted from 1, so that zeros are an empty table.
template <class State>
class ems_table {
  using number = std::conditional_t<std::is_const_v<State>, const float, float>;

 public:
  /// `all`: of all queries; `past`, `current`: of the last window and of this one; `norm`: of the
  /// token's own key.
  enum field : std::size_t { all, past, current, norm, next, fields };
  static constexpr index_t none = -1;

  /// Floats for so many places.
  static std::size_t size(std::size_t places, index_t group) {
    return header + 2 * as_size(group) + places * place_size;
  }

  ems_table(State& state, index_t group)
      : slots_(state.memory_capacity()),
        memory_(state.memory()),
        scratch_(memory_.subspan(header, 2 * as_size(group))),
        places_(memory_.subspan(header + scratch_.size())) {
    for (std::size_t f = 0; f < fields; ++f) {
      column_[f] = state.column(static_cast<index_t>(f)).data();
    }
  }

  /// Tokens that share an entry: now, and at most.
  index_t sharing() const { return count(sharing_count); }
  index_t places() const { return static_cast<index_t>(places_.size() / place_size); }
  /// Names of tokens are below this.
  index_t names() const { return slots_ + places(); }
  /// Queries in the current window.
  number& queries() const { return memory_[window_count]; }
  /// Room for two numbers a query head.
  std::span<number> scratch() const { return scratch_; }

  number& at(field f, index_t token) const {
    return token < slots_ ? column_[f][token] : places_[place(token) + f];
  }
  /// The numbers of the slots' own tokens.
  number* of_slots(field f) const { return column_[f]; }
  index_t position(const kv_head auto& head, index_t token) const {
    return token < slots_ ? head.position(token)
                          : std::bit_cast<index_t>(places_[place(token) + fields]);
  }
  /// The norm of a slot's own token, counted or not yet.
  float norm_of(const kv_head auto& head, index_t s) const {
    return at(norm, s) < 0 ? search::key_norm(head, s) : at(norm, s);
  }
  /// The token that joined its entry next; `none`.
  index_t after(index_t token) const { return token_of(at(next, token)); }
  /// Does the slot's entry hold more than its centre?
  bool shared(index_t s) const { return column_[next][s] != 0; }

  /// `f(token)` for every token of an entry: the centre, then those that share it.
  template <class F>
  void each(index_t s, F f) const {
    for (index_t token = s; token != none; token = after(token)) {
      f(token);
    }
  }

  /// Counts the norms of tokens appended since the last call.
  void measure(const kv_head auto& head) const {
    for (index_t s = 0; s < head.length(); ++s) {
      at(norm, s) = norm_of(head, s);
    }
  }

  /// Takes the token after `token` out of the table.
  void remove_after(index_t token) const {
    const index_t taken = after(token);
    const float link = at(next, token);
    at(next, token) = at(next, taken);
    at(next, taken) = memory_[free];
    memory_[free] = link;
    --memory_[sharing_count];
  }
  void remove_sharing(index_t s) const {
    while (shared(s)) {
      remove_after(s);
    }
  }

  /// The tokens of entry `s` go after those of entry `into`; its centre too, or, unless
  /// `with_centre`, nowhere.
  void join(const kv_head auto& head, index_t into, index_t s, bool with_centre) const {
    index_t last = into;
    each(into, [&](index_t token) { last = token; });
    if (with_centre) {
      const float link = free_place();
      const index_t token = token_of(link);
      for (const field f : {all, past, current, norm}) {
        at(f, token) = at(f, s);
      }
      places_[place(token) + fields] = std::bit_cast<float>(head.position(s));
      at(next, last) = link;
      last = token;
    }
    at(next, last) = at(next, s);
    at(next, s) = 0;
  }

 private:
  enum memory_name : std::size_t { window_count, sharing_count, used, free, header };
  static constexpr std::size_t place_size = fields + 1;  // and the position

  index_t count(std::size_t i) const { return static_cast<index_t>(memory_[i]); }
  std::size_t place(index_t token) const { return as_size(token - slots_) * place_size; }
  index_t token_of(float link) const {
    return link == 0 ? none : slots_ + static_cast<index_t>(link) - 1;
  }
  /// The link of a free place.
  float free_place() const {
    ++memory_[sharing_count];
    const float link = memory_[free];
    if (link != 0) {
      memory_[free] = at(next, token_of(link));
      return link;
    }
    expects(count(used) < places(), "ems: expected at most ", places(),
            " tokens that share entries, got one more");
    return ++memory_[used];
  }

  index_t slots_;
  std::array<number*, fields> column_{};
  std::span<number> memory_, scratch_, places_;
};

/// The table counts tokens; log-mass would be another's account of them.
void expect_no_log_mass(const kv_head auto& head) {
  for (index_t s = 0; s < head.length(); ++s) {
    expects(errc::unsupported, head.log_mass(s) == 0, "ems: expected no log-mass, got ",
            head.log_mass(s));
  }
}

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
  centre.assign(as_size(change.length()), evicted);
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const merge_source& e : change.row(r)) {
      centre[as_size(e.source)] = moved;
    }
  }
  index_t joining = -change.rows();
  for (index_t s = 0; s < head.length(); ++s) {
    if (centre[as_size(s)] == evicted) {
      tokens.remove_sharing(s);
    } else {
      ++joining;
    }
  }
  const auto each_source = [&](auto see) {
    for (index_t r = 0; r < change.rows(); ++r) {
      for (const merge_source& e : change.row(r)) {
        char& mark = centre[as_size(e.source)];
        see(e.source, e.source != change.anchor(r) ? &mark : nullptr);
      }
    }
  };
  for (index_t more = tokens.sharing() + joining - most; more > 0; --more) {
    make_room(tokens, each_source, score);
  }
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const merge_source& e : change.row(r).subspan(1)) {
      tokens.join(head, change.anchor(r), e.source, centre[as_size(e.source)] == moved);
    }
  }
}

}  // namespace detail
}  // namespace kvmeld::inline v0
