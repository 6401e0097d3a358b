/// What a policy is, and what the library does for one that leaves things out.
#pragma once

#include <array>
#include <concepts>
#include <span>
#include <string_view>

#include "kvfold/apply.hpp"
#include "kvfold/queries.hpp"

namespace kvfold {

/// Slots a head may hold: compressed to `target` as soon as it holds `trigger`.
struct budget {
  index_t target = 0;
  index_t trigger = 0;  ///< 0: target + 1, so every decode step; more: now and then

  index_t trigger_length() const { return trigger == 0 ? target + 1 : trigger; }
};

/// A KV-cache compression policy: a small value that makes plans. Two members are all it takes:
///
///     static constexpr std::string_view name();
///     void plan(const kv_head auto& head, const head_state& state, index_t target,
///               merge_plan& out) const;
///
/// `plan` is pure: it reads the head and the state, and writes `target` rows into `out` (called
/// only when the head holds more than `target` slots). It may use `out`'s scratch. The rest is
/// optional:
///
///     std::array<column, n> columns() const;            one float per slot each, in `head_state`
///     std::size_t memory(index_t dim, index_t group) const;   floats per head beside the columns
///     index_t least() const;                            smallest target; default 1
///     void validate() const;                            throws on parameters out of range
///     group_combine combine;                            of the group's attention; default sum
///     void observe(const kv_head auto& head, head_state&, std::span<const float> attention) const;
///                                                       one query's, `[length]`, group combined
///     void observe(const kv_head auto& head, head_state&, const query_view<T>&) const;
///                                                       a prompt's reference queries
///     departure leaving(const kv_head auto& head, const head_state&, index_t target) const;
///                                                       equals plan(length − 1), in O(dim) to
///                                                       apply
///     void settle(const kv_head auto& head, head_state&, index_t target) const;
///                                                       after every return to the budget
///     static constexpr bool bounded = false;            never compresses (full_cache)
template <class P>
concept policy = std::copyable<P> &&
    requires(const P& p, const head_view<float>& head, const head_state& state, index_t target,
             merge_plan& out) {
  { p.name() } -> std::convertible_to<std::string_view>;
  p.plan(head, state, target, out);
};

/// The optional members, with their defaults in one place.
namespace traits {

template <class P>
auto columns(const P& p) {
  if constexpr (requires { p.columns(); }) {
    return p.columns();
  } else {
    return std::array<column, 0>{};
  }
}

/// How many, without making them: `any_policy` would allocate.
template <class P>
index_t column_count(const P& p) {
  if constexpr (requires { p.column_count(); }) {
    return p.column_count();
  } else {
    return static_cast<index_t>(columns(p).size());
  }
}

template <class P>
std::size_t memory(const P& p, index_t dim, index_t group) {
  if constexpr (requires { p.memory(dim, group); }) {
    return p.memory(dim, group);
  } else {
    return 0;
  }
}

template <class P>
index_t least(const P& p) {
  if constexpr (requires { p.least(); }) {
    return p.least();
  } else {
    return 1;
  }
}

template <class P>
void validate(const P& p) {
  if constexpr (requires { p.validate(); }) {
    p.validate();
  }
}

template <class P>
group_combine combine(const P& p) {
  if constexpr (requires { p.combine(); }) {
    return p.combine();
  } else if constexpr (requires { group_combine{p.combine}; }) {
    return p.combine;
  } else {
    return group_combine::sum;
  }
}

template <class P>
bool bounded(const P& p) {
  if constexpr (requires { p.bounded(); }) {
    return p.bounded();
  } else if constexpr (requires { P::bounded; }) {
    return P::bounded;
  } else {
    return true;
  }
}

/// Does the policy fold attention into its state? `any_policy` knows at run time only.
template <class P>
bool measures(const P& p) {
  if constexpr (requires { p.measures(); }) {
    return p.measures();
  } else {
    return requires(const head_view<float>& head, head_state& state, std::span<const float> a) {
      p.observe(head, state, a);
    };
  }
}

template <class P>
void observe(const P& p, const kv_head auto& head, head_state& state,
             std::span<const float> attention) {
  if constexpr (requires { p.observe(head, state, attention); }) {
    p.observe(head, state, attention);
  }
}

template <class P, class T>
void observe(const P& p, const kv_head auto& head, head_state& state,
             const query_view<T>& queries) {
  if constexpr (requires { p.observe(head, state, queries); }) {
    p.observe(head, state, queries);
  }
}

/// One slot's departure: the policy's own, or none offered (false).
template <class P>
bool leaving(const P& p, const kv_head auto& head, const head_state& state, index_t target,
             departure& out) {
  if constexpr (requires {
                  { p.leaving(head, state, target, out) } -> std::same_as<bool>;
                }) {
    return p.leaving(head, state, target, out);
  } else if constexpr (requires { p.leaving(head, state, target); }) {
    out = p.leaving(head, state, target);
    return true;
  } else {
    return false;
  }
}

template <class P>
void settle(const P& p, const kv_head auto& head, head_state& state, index_t target) {
  if constexpr (requires { p.settle(head, state, target); }) {
    p.settle(head, state, target);
  }
}

}  // namespace traits

/// Makes the plan that brings `head` to `target` slots: the identity when it holds no more.
/// Refused: parameters out of range, a target below the least that the policy can do.
template <policy P>
void plan(const P& p, const kv_head auto& head, const head_state& state, index_t target,
          merge_plan& out) {
  expects(state.length() == head.length(), "plan: a state of ", head.length(),
          " slots expected (extend it), ", state.length(), " came");
  if (!traits::bounded(p) || head.length() <= target) {
    out.reset(head.length());
    for (index_t s = 0; s < head.length(); ++s) {
      out.keep(s, head.log_mass(s));
    }
    return;
  }
  p.plan(head, state, target, out);
}

/// Throws unless `p` can hold a head of this capacity within `b`.
template <policy P>
void check(const P& p, const budget& b, index_t capacity) {
  traits::validate(p);
  if (!traits::bounded(p)) {
    return;
  }
  expects(b.target > 0, p.name(), ": a budget of at least 1 slot expected, ", b.target, " came");
  expects(b.target >= traits::least(p), p.name(), ": a budget of at least ", traits::least(p),
          " slots expected (protected tokens and one more), ", b.target, " came");
  expects(b.target <= capacity, p.name(), ": a capacity of at least the budget of ", b.target,
          " slots expected, ", capacity, " came");
  expects(b.trigger == 0 || b.trigger > b.target, p.name(), ": a trigger above the target of ",
          b.target, " expected, ", b.trigger, " came");
}

}  // namespace kvfold
