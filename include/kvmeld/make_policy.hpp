// SPDX-License-Identifier: MIT
/// A policy from text, as a command line or a configuration has it:
/// `make_policy("fold:share=0.4")`.
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::floor
#include <iterator>   // std::back_inserter
#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>  // std::is_enum_v
#include <vector>

#include "kvmeld/any_policy.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// What a parameter's type takes.
enum class number_kind { real, whole, choice };

/// A decimal number that is all of `text`, with a point whatever the locale; none: it is no finite
/// one. (libc++ has `std::from_chars` for double from 20 on.)
inline std::optional<double> parse_number(std::string_view text) {
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

/// The number of `assignment` ("share=0.4"), as `kind` takes it.
inline double assigned_number(std::string_view policy, std::string_view assignment,
                              number_kind kind) {
  const std::string_view text = assignment.substr(assignment.find('=') + 1);
  const std::optional<double> given = parse_number(text);
  expects(given.has_value(), policy, ": expected parameter=number, got '", assignment, "'");
  const double x = given.value_or(0);
  expects(kind == number_kind::real || (x == std::floor(x) && std::abs(x) < 1e9), policy,
          ": expected a whole number, got '", assignment, "'");
  expects(kind != number_kind::choice || x == 0 || x == 1, policy, ": expected 0 or 1, got '",
          assignment, "'");
  return x;
}

}  // namespace detail

/// Sets the parameter that `assignment` names: "share=0.4"; of a bool or of two modes 0 or 1.
/// Refused, with nothing changed: a name that the policy has not, with those that it has; what is
/// no number; a value that the policy refuses.
template <policy P>
void set_parameter(P& policy, std::string_view assignment) {
  const std::string_view name = assignment.substr(0, assignment.find('='));
  P changed = policy;
  std::string known;
  bool found = false;
  const auto set = [&](auto& p) {
    if constexpr (requires { p.parameters(p, [](const char*, auto&) {}); }) {
      p.parameters(p, [&](const char* label, auto& member) {
        known += (known.empty() ? "" : ", ") + std::string(label);
        if (name == label) {
          using type = std::remove_reference_t<decltype(member)>;
          using detail::number_kind;
          found = true;
          const double x = detail::assigned_number(
              policy.name(), assignment,
              std::is_floating_point_v<type>                       ? number_kind::real
              : std::is_enum_v<type> || std::is_same_v<type, bool> ? number_kind::choice
                                                                   : number_kind::whole);
          expects(x >= 0 || !std::is_unsigned_v<type>, policy.name(),
                  ": expected a number of at least 0, got '", assignment, "'");
          member = static_cast<type>(x);
        }
      });
    }
  };
  if constexpr (requires { changed.visit(set); }) {
    changed.visit(set);
  } else {
    set(changed);
  }
  expects(found, policy.name(), ": expected ", known.empty() ? "no parameters" : "one of ", known,
          ", got '", name, "'");
  traits::validate(changed);
  policy = changed;
}

/// The policy of that name with its default parameters, but for those that are given:
/// `name[:parameter=value,...]`. `Any`: the variant, such as an `any_policy_with` one's own.
/// Refused: an unknown name, with those that there are; what `set_parameter` refuses.
template <class Any = any_policy>
Any make_policy(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  std::string known;
  std::vector<Any> all;
  for (const Any& p : Any::every()) {
    p.visit([&](const auto& one) {
      if constexpr (requires { one.on_each_scorer(); }) {
        std::ranges::copy(one.on_each_scorer(), std::back_inserter(all));
      } else {
        all.push_back(one);
      }
    });
  }
  for (Any& p : all) {
    if (p.name() == name) {
      std::string_view rest = text.substr(std::min(name.size() + 1, text.size()));
      while (!rest.empty()) {
        const std::string_view one = rest.substr(0, rest.find(','));
        set_parameter(p, one);
        rest.remove_prefix(std::min(one.size() + 1, rest.size()));
      }
      return p;
    }
    known += (known.empty() ? "" : ", ") + std::string(p.name());
  }
  detail::refuse(errc::invalid_argument, "make_policy: expected one of ", known, ", got '", name,
                 "'");
}

}  // namespace kvmeld::inline v0
