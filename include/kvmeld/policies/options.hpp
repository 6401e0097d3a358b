// SPDX-License-Identifier: MIT
/// The options of a policy, each declared once: what it is called, where it is kept, its range, and
/// what it means. Text, checks, equality and docs/reference/policies.md follow from these.
#pragma once

#include <algorithm>  // std::min
#include <charconv>   // std::to_chars
#include <cmath>      // std::floor, std::isfinite
#include <limits>     // std::numeric_limits
#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>  // std::is_enum_v

#include "kvmeld/error.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

/// An end of a range; `open`: itself not in it.
struct bound {
  double value = 0;   ///< where it ends
  bool open = false;  ///< is `value` itself not in it?

  /// A number is a closed end.
  constexpr bound(double at, bool is_open = false) : value(at), open(is_open) {}  // NOLINT
};

/// @{
inline constexpr bound below_1{1, true}, above_0{0, true};
inline constexpr bound any_count{search::max_tokens};  ///< so many that sums do not overflow
inline constexpr bound any_seed{double(1LL << 53)};    ///< that text says without rounding
inline constexpr bound any_number{std::numeric_limits<double>::infinity(), true};  ///< finite
inline constexpr bound endless{std::numeric_limits<double>::infinity()};
inline constexpr bound any_negative{-std::numeric_limits<double>::infinity(), true};
/// @}

namespace detail {

/// A policy chosen at run time: `visit` calls with the one inside.
template <class P>
concept chosen_at_run_time = requires {
  P::every();
};

/// The shortest text of a number, with a decimal point in every locale.
template <class T>
std::string number_text(T x) {
  if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>) {
    return number_text(static_cast<int>(x));
  } else {
    char text[64];
    return {text, std::to_chars(text, text + sizeof(text), x).ptr};
  }
}

/// An option; `member(p)` is where `p` keeps it.
template <class Member>
struct option_of {
  std::string_view name;
  bound low, high;
  std::string_view meaning;
  Member member;

  constexpr bool holds(double x) const {
    return (low.open ? x > low.value : x >= low.value) &&
           (high.open ? x < high.value : x <= high.value);
  }
  /// "[0, 1)"
  std::string range() const {
    std::string text = low.open ? "(" : "[";  // appended to: g++ 12 warns of "..." + std::string
    text += number_text(low.value);
    text += ", ";
    text += number_text(high.value);
    text += high.open ? ")" : "]";
    return text;
  }
};
template <class Member>
constexpr auto make_option(std::string_view name, bound low, bound high, std::string_view meaning,
                           Member member) {
  return option_of<Member>{name, low, high, meaning, member};
}

}  // namespace detail

/// An option that `P` keeps in `member`: a number, or an enumeration's.
template <class P, class T>
constexpr auto option(std::string_view name, T P::*member, bound low, bound high,
                      std::string_view meaning) {
  return detail::make_option(
      name, low, high, meaning, [member](auto& p) -> auto& { return p.*member; });
}
/// One that is 0 or 1.
template <class P>
constexpr auto option(std::string_view name, bool P::*member, std::string_view meaning) {
  return option(name, member, 0, 1, meaning);
}
/// How a group's attention becomes one.
template <class P>
constexpr auto option(group_combine P::*member) {
  return option("combine", member, 0, 2,
                "of a group's attention: 0 the sum, 1 the mean, 2 the largest");
}
/// Where a part of a policy keeps an option: `in(&fold::prompt, &fold_prompt::pool)`.
constexpr auto in(auto... members) {
  return [members...](auto& p) -> auto& { return (p.*....*members); };
}
/// One that a part keeps.
template <class Member>
constexpr auto option(std::string_view name, Member member, bound low, bound high,
                      std::string_view meaning) {
  return detail::make_option(name, low, high, meaning, member);
}

/// `f(option, owner)` for each option; `owner`: the policy that has it, or a policy inside that.
template <class P, class F>
void each_option(P& p, const F& f) {
  if constexpr (requires { p.each_option(p, f); }) {
    p.each_option(p, f);
  } else if constexpr (detail::chosen_at_run_time<std::remove_const_t<P>>) {
    p.visit([&](auto& one) { each_option(one, f); });
  } else if constexpr (requires { P::options; }) {
    std::apply([&](const auto&... one) { (f(one, p), ...); }, P::options);
  }
}

namespace detail {

template <class P, class Option>
void expect_in_range(const P& p, const Option& option, double x) {
  if (!option.holds(x)) {
    expects(false, p.name(), ": expected ", option.name, " in ", option.range(), ", got ",
            number_text(x));
  }
}

/// The decimal number that `text` is, with a decimal point in every locale, or infinity, which an
/// option may be; none: it is no such number. (libc++ has `std::from_chars` for double from 20 on.)
inline std::optional<double> parse_number(std::string_view text) {
  if (text == number_text(endless.value)) {
    return endless.value;
  }
  if (text.empty() || text.front() == '+' ||
      text.find_first_not_of("0123456789.eE+-") != std::string_view::npos) {
    return std::nullopt;
  }
  std::istringstream in{std::string(text)};
  in.imbue(std::locale::classic());
  double x = 0;
  in >> x;
  const bool is_all = !in.fail() && in.peek() == std::istringstream::traits_type::eof();
  return is_all && std::isfinite(x) ? std::optional(x) : std::nullopt;
}

}  // namespace detail

/// Throws unless every option is in its range (`name: expected OPTION in [a, b], got x`), and the
/// policy's own `validate` takes them together.
template <class P>
void validate(const P& p) {
  each_option(p, [&](const auto& option, const auto& owner) {
    detail::expect_in_range(p, option, static_cast<double>(option.member(owner)));
  });
  if constexpr (detail::chosen_at_run_time<P>) {
    p.visit([](const auto& one) { validate(one); });
  } else if constexpr (requires { p.validate(); }) {
    p.validate();
  }
}

/// The policy as `make_policy` reads it: `name[:option=value,...]` without what is as by default.
template <class P>
std::string text(const P& p) {
  std::string all(p.name());
  char before = ':';
  each_option(p, [&](const auto& option, const auto& owner) {
    const auto own = detail::number_text(option.member(owner));
    const std::remove_cvref_t<decltype(owner)> others{};
    if (own != detail::number_text(option.member(others))) {
      all += before;
      all += option.name;
      all += '=';
      all += own;
      before = ',';
    }
  });
  return all;
}

/// Sets the option that `assignment` names: "share=0.4"; of a bool or of modes 0, 1, ... Refused,
/// with nothing changed: a name that the policy has not, with those that it has; what is no number;
/// a value that the policy refuses.
template <class P>
void set_option(P& policy, std::string_view assignment) {
  const std::string_view name = assignment.substr(0, assignment.find('='));
  P changed = policy;
  std::string known;
  bool found = false;
  each_option(changed, [&](const auto& option, auto& owner) {
    known += known.empty() ? "" : ", ";
    known += option.name;
    if (name != option.name) {
      return;
    }
    found = true;
    auto& member = option.member(owner);
    using type = std::remove_reference_t<decltype(member)>;
    const std::string_view given = assignment.substr(std::min(name.size() + 1, assignment.size()));
    const std::optional<double> x = detail::parse_number(given);
    expects(x.has_value(), policy.name(), ": expected option=number, got '", assignment, "'");
    expects(std::is_floating_point_v<type> || *x == std::floor(*x), policy.name(),
            ": expected a whole number, got '", assignment, "'");
    detail::expect_in_range(policy, option, *x);
    member = static_cast<type>(*x);
  });
  expects(found, policy.name(), ": expected ", known.empty() ? "no options" : "one of ", known,
          ", got '", name, "'");
  validate(changed);
  policy = changed;
}

}  // namespace kvmeld::inline v0
