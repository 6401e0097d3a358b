// SPDX-License-Identifier: MIT
/// One line of results, and all its columns in one list.
#pragma once

#include <fmt/format.h>

#include <array>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "kvmeld/config.hpp"

namespace evaluate {

using kvmeld::index_t;

/// A policy at a budget. What was not asked for is empty.
struct row {
  std::string policy;
  std::string budget = "1";  ///< as it was given
  index_t slots = 0;
  std::optional<double> attention_error = {}, nll = {}, needle_after = {}, needle_inside = {},
                        stream_error = {}, bytes = {}, prefill_ms = {}, decode_tokens_per_s = {},
                        decode_vs_full = {}, kl = {}, output_error = {};
  /// Standard errors over prompts or cases.
  std::optional<double> attention_error_se = {}, nll_se = {}, needle_after_se = {},
                        needle_inside_se = {}, kl_se = {}, output_error_se = {};
};

enum class best { none, lowest, highest };

struct column {
  std::string_view name;  ///< in the CSV file
  std::optional<double> row::*value;
  std::array<std::string_view, 2> heading;  ///< in the table: what, and its unit
  evaluate::best best;
  int digits;                                            ///< behind the point, in the table
  std::optional<double> row::*standard_error = nullptr;  ///< `name`_se in the file; null: none
  bool later = false;  ///< last in the file, whose order does not change; not in the table
};

inline constexpr std::array columns = {
    column{"attention_error",
           &row::attention_error,
           {"attention", "error"},
           best::lowest,
           3,
           &row::attention_error_se},
    column{"nll", &row::nll, {"nll", "nats/token"}, best::lowest, 3, &row::nll_se},
    column{"needle_after",
           &row::needle_after,
           {"needle", "after, %"},
           best::highest,
           0,
           &row::needle_after_se},
    column{"needle_inside",
           &row::needle_inside,
           {"needle", "inside, %"},
           best::highest,
           0,
           &row::needle_inside_se},
    column{"stream_error", &row::stream_error, {"stream", "error"}, best::lowest, 3},
    column{"bytes", &row::bytes, {"cache and", "state"}, best::lowest, 0},
    column{"prefill_ms", &row::prefill_ms, {"prefill", "ms"}, best::lowest, 0},
    column{
        "decode_tokens_per_s", &row::decode_tokens_per_s, {"decode", "tokens/s"}, best::highest, 0},
    column{"decode_vs_full", &row::decode_vs_full, {"decode", "vs full"}, best::highest, 2},
    column{"kl", &row::kl, {"kl to full", "nats/token"}, best::lowest, 4, &row::kl_se},
    column{"output_error",
           &row::output_error,
           {"output", "error"},
           best::lowest,
           4,
           &row::output_error_se,
           true},
};

/// `f(column, standard error or not)` in the order of the file.
template <class F>
void for_each_field(F f) {
  for (const bool later : {false, true}) {
    for (const bool error : {false, true}) {
      for (const column& c : columns) {
        if (c.later == later && (!error || c.standard_error != nullptr)) {
          f(c, error);
        }
      }
    }
  }
}

inline void write_csv_header(std::ostream& out) {
  out << "policy,budget,slots";
  for_each_field(
      [&](const column& c, bool error) { out << ',' << c.name << (error ? "_se" : ""); });
  out << std::endl;
}

/// A field of a CSV file (RFC 4180): in quotes where it needs them, as names with several
/// parameters do.
inline std::string csv_field(std::string text) {
  if (text.find_first_of(",\"\n") == std::string::npos) {
    return text;
  }
  for (std::size_t at = 0; (at = text.find('"', at)) != std::string::npos; at += 2) {
    text.insert(at, 1, '"');
  }
  return '"' + text + '"';
}

/// Flushed, so that whatever happens next, the rows done are there.
inline void write_csv(std::ostream& out, const row& r) {
  out << fmt::format("{},{},{}", csv_field(r.policy), r.budget, r.slots);
  for_each_field([&](const column& c, bool error) {
    const auto& x = r.*(error ? c.standard_error : c.value);
    out << ',' << (x ? fmt::format("{:.{}g}", *x, *x >= 1e6 ? 12 : 6) : "");
  });
  out << std::endl;
}

}  // namespace evaluate
