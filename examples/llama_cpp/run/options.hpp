// SPDX-License-Identifier: MIT
/// What `kvmeld-run` tells the library that it loads into a program: through the environment.
#pragma once

#include <charconv>  // std::from_chars
#include <cmath>     // std::floor
#include <cstdlib>   // std::getenv
#include <string>
#include <string_view>

#include "kvmeld/error.hpp"
#include "kvmeld/kvmeld.hpp"

namespace kvmeld::llama::run {

/// Slots of a head: so many, or a share of the tokens that a sequence may have.
struct amount {
  double value = 0.1;
  bool is_share = true;

  /// From "512", "10%". Refused: anything else.
  static amount parse(std::string_view text) {
    amount a;
    a.is_share = text.ends_with('%');
    const std::string_view number = text.substr(0, text.size() - (a.is_share ? 1 : 0));
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), a.value);
    expects(
        error == std::errc() && end == number.data() + number.size() && a.value > 0 &&
            (a.is_share ? a.value <= 100 : a.value <= 1 << 24 && a.value == std::floor(a.value)),
        "--budget: expected slots, or a share over 0% and up to 100%, got '", text, "'");
    a.value /= a.is_share ? 100 : 1;
    return a;
  }
  index_t of(index_t tokens) const {
    return static_cast<index_t>(is_share ? value * tokens + 1e-9 : value);
  }
};

struct settings {
  amount budget;
  any_policy policy = fold{};
  bool equal = false;  ///< the same budget for every head, under any policy
  bool stop = false;   ///< where nothing can be compressed, instead of going on without

  static constexpr const char *budget_name = "KVMELD_RUN_BUDGET",
                              *policy_name = "KVMELD_RUN_POLICY", *equal_name = "KVMELD_RUN_EQUAL",
                              *stop_name = "KVMELD_RUN_STOP";

  static settings from_environment() {
    const auto said = [](const char* name, const char* without) {
      const char* const text = std::getenv(name);
      return std::string(text != nullptr ? text : without);
    };
    return {.budget = amount::parse(said(budget_name, "10%")),
            .policy = make_policy(said(policy_name, "fold")),
            .equal = said(equal_name, "0") == "1",
            .stop = said(stop_name, "0") == "1"};
  }

  /// Do the heads of a model share its slots?
  bool is_shared() const {
    return !equal && policy.visit([](const auto& p) {
      return requires { p.sharing(index_t{}, index_t{}); };
    });
  }
};

}  // namespace kvmeld::llama::run
