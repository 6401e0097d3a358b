// SPDX-License-Identifier: MIT
/// A policy from text, as a command line or a configuration has it:
/// `make_policy("fold:share=0.4")`.
#pragma once

#include <algorithm>  // std::min
#include <iterator>   // std::back_inserter
#include <string>
#include <string_view>
#include <vector>

#include "kvmeld/any_policy.hpp"

namespace kvmeld::inline v0 {

/// The policy of that name with its default options, but for those that are given:
/// `name[:option=value,...]`. `Any`: the variant, such as an `any_policy_with` one's own.
/// Refused: an unknown name, with those that there are; what `set_option` refuses.
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
        set_option(p, one);
        rest.remove_prefix(std::min(one.size() + 1, rest.size()));
      }
      return p;
    }
    known += (known.empty() ? "" : ", ") + std::string(p.name());
  }
  detail::refuse(errc::invalid_argument, "make_policy: expected one of ", known, ", got '", name,
                 "'");
}

#ifdef KVMELD_COMPILED  // as the target kvmeld::compiled defines it, which has these
extern template any_policy make_policy(std::string_view);
extern template void set_option(any_policy&, std::string_view);
extern template std::string text(const any_policy&);
extern template void validate(const any_policy&);
#endif

}  // namespace kvmeld::inline v0
