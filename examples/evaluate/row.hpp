// SPDX-License-Identifier: MIT
/// One line of results, and all its columns in one list.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "evaluate/estimate.hpp"
#include "evaluate/options.hpp"

namespace evaluate {

/// A policy at a budget. What was not asked for is empty; standard errors are over prompts or
/// cases.
struct row {
  std::string policy;
  std::string budget = "1.0";  ///< as it was given
  index_t slots = 0;
  std::optional<estimate> attention_error = {}, nll = {}, needle_after = {}, needle_inside = {},
                          stream_error = {}, bytes = {}, prefill_ms = {}, decode_tokens_per_s = {},
                          decode_vs_full = {}, kl = {}, output_error = {};
};

using figure = std::optional<estimate> row::*;

inline double mean_of(const std::optional<estimate>& x, double otherwise = 0) {
  return x ? x->mean : otherwise;
}

struct column {
  std::string_view name;  ///< in the CSV file
  figure value;
  bool task_set::*task;         ///< null: always shown
  std::string_view what, unit;  ///< its heading in the table
  bool high;                    ///< the more, the better
  int digits;                   ///< behind the point, in the table
  bool has_error = false;       ///< `name`_se in the file
  bool later = false;           ///< last in the file, whose order does not change; not in the table
};

inline constexpr bool low = false, high = true;
inline constexpr column columns[] = {
    {"attention_error", &row::attention_error, &task_set::error, "attention", "error", low, 3,
     true},
    {"nll", &row::nll, &task_set::nll, "nll", "nats/token", low, 3, true},
    {"needle_after", &row::needle_after, &task_set::needle, "needle", "after, %", high, 0, true},
    {"needle_inside", &row::needle_inside, &task_set::needle, "needle", "inside, %", high, 0, true},
    {"stream_error", &row::stream_error, &task_set::stream, "stream", "error", low, 3},
    {"bytes", &row::bytes, nullptr, "cache and", "state", low, 0},
    {"prefill_ms", &row::prefill_ms, &task_set::speed, "prefill", "ms", low, 0},
    {"decode_tokens_per_s", &row::decode_tokens_per_s, &task_set::speed, "decode", "tokens/s", high,
     0},
    {"decode_vs_full", &row::decode_vs_full, &task_set::speed, "decode", "vs full", high, 2},
    {"kl", &row::kl, &task_set::nll, "kl to full", "nats/token", low, 4, true},
    {"output_error", &row::output_error, &task_set::error, "output", "error", low, 4, true, true},
};

/// `f(column, standard error or not)` in the order of the file.
template <class F>
void for_each_field(F f) {
  for (const bool later : {false, true}) {
    for (const bool error : {false, true}) {
      for (const column& c : columns) {
        if (c.later == later && (!error || c.has_error)) {
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
    const auto& found = r.*c.value;
    const auto x = !found ? std::nullopt : error ? found->error : std::optional(found->mean);
    out << ',' << (x ? fmt::format("{:.{}g}", *x, *x >= 1e6 ? 12 : 6) : "");
  });
  out << std::endl;
}

}  // namespace evaluate
