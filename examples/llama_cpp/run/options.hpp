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

/// What a sequence may hold.
struct amount {
  enum class unit { share, slots, bytes };
  double value = 0.1;
  unit in = unit::share;

  /// "10%" of the bytes of a 16-bit cache, "64MiB" (KiB, GiB), or "512" slots of a head. Refused:
  /// anything else.
  static amount parse(std::string_view text) {
    amount a;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), a.value);
    const std::string_view of = text.substr(static_cast<std::size_t>(end - text.data()));
    const double scale = of == "%"     ? 0.01
                         : of == "KiB" ? 1 << 10
                         : of == "MiB" ? 1 << 20
                         : of == "GiB" ? 1 << 30
                                       : 1;
    a.in = of == "%" ? unit::share : of.empty() ? unit::slots : unit::bytes;
    a.value *= scale;
    expects(error == std::errc() && (of.empty() || scale != 1) && a.value > 0 &&
                a.value <= (a.in == unit::share   ? 1
                            : a.in == unit::slots ? 1 << 24
                                                  : 1e15) &&
                (a.in != unit::slots || a.value == std::floor(a.value)),
            "--budget: expected a share over 0% and up to 100%, bytes as 64MiB, or slots, got '",
            text, "'");
    return a;
  }
};

struct settings {
  /// What loses least at a tenth and a fifth of the bytes (docs/explanation/benchmarks.md).
  static constexpr const char* default_rows = "k6v4";

  amount budget;
  any_policy policy = fold{};
  storage_pair rows = make_storage(default_rows);
  bool equal = false;  ///< the same budget for every head, under any policy
  bool stop = false;   ///< where nothing can be compressed, instead of going on without

  static constexpr const char *budget_name = "KVMELD_RUN_BUDGET",
                              *policy_name = "KVMELD_RUN_POLICY", *rows_name = "KVMELD_RUN_ROWS",
                              *equal_name = "KVMELD_RUN_EQUAL", *stop_name = "KVMELD_RUN_STOP";

  static settings from_environment() {
    const auto said = [](const char* name, const char* without) {
      const char* const text = std::getenv(name);
      return std::string(text != nullptr ? text : without);
    };
    return {.budget = amount::parse(said(budget_name, "10%")),
            .policy = make_policy(said(policy_name, "fold")),
            .rows = make_storage(said(rows_name, default_rows)),
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
