/// One line of results, and all its columns in one list.
#pragma once

#include <fmt/format.h>

#include <array>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "kvfold/config.hpp"

namespace evaluate {

using kvfold::index_t;

/// A policy at a budget. What was not asked for is empty.
struct row {
  std::string policy;
  double budget = 1;  ///< as it was given
  index_t slots = 0;
  std::optional<double> attention_error = {}, nll = {}, needle_after = {}, needle_inside = {},
                        stream_error = {}, bytes = {}, prefill_ms = {}, decode_tokens_per_s = {},
                        decode_vs_full = {}, kl = {};
};

enum class best { none, lowest, highest };

struct column {
  std::string_view name;  ///< in the CSV file
  std::optional<double> row::*value;
  std::array<std::string_view, 2> heading;  ///< in the table: what, and its unit
  evaluate::best best;
  int digits;  ///< behind the point, in the table
};

inline constexpr std::array columns = {
    column{"attention_error", &row::attention_error, {"attention", "error"}, best::lowest, 3},
    column{"nll", &row::nll, {"nll", "nats/token"}, best::lowest, 3},
    column{"needle_after", &row::needle_after, {"needle", "after, %"}, best::highest, 0},
    column{"needle_inside", &row::needle_inside, {"needle", "inside, %"}, best::highest, 0},
    column{"stream_error", &row::stream_error, {"stream", "error"}, best::lowest, 3},
    column{"bytes", &row::bytes, {"cache and", "state"}, best::lowest, 0},
    column{"prefill_ms", &row::prefill_ms, {"prefill", "ms"}, best::lowest, 0},
    column{
        "decode_tokens_per_s", &row::decode_tokens_per_s, {"decode", "tokens/s"}, best::highest, 0},
    column{"decode_vs_full", &row::decode_vs_full, {"decode", "vs full"}, best::highest, 2},
    column{"kl", &row::kl, {"kl to full", "nats/token"}, best::lowest, 4},
};

inline void write_csv_header(std::ostream& out) {
  out << "policy,budget,slots";
  for (const column& c : columns) {
    out << ',' << c.name;
  }
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
  for (const column& c : columns) {
    const auto& x = r.*c.value;
    out << ',' << (x ? fmt::format("{:.{}g}", *x, *x >= 1e6 ? 12 : 6) : "");
  }
  out << std::endl;
}

}  // namespace evaluate
