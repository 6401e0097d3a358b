// SPDX-License-Identifier: MIT
// The table that kvmeld-llama-tables prints, on the bundled model.
#include "llama_cpp/tables.hpp"

#include <catch2/catch.hpp>
#include <sstream>

#include "evaluate/policies.hpp"
#include "llama_cpp/bundled.hpp"
#include "support/paths.hpp"

namespace tables_test {

using namespace test;
using kvmeld::llama::mode;
using kvmeld::llama::parse_modes;

evaluate::options few_cases(const std::string& policies) {
  evaluate::options o;
  o.model = bundled::folder();
  o.text = bundled::text_file();
  o.policies = evaluate::detail::parse_policies(policies);
  o.budgets = {{0.25}, {32, evaluate::budget_option::unit::slots}};
  o.prompt = 256, o.prompts = 2, o.cases = 2, o.needles = 1;
  return o;
}

std::string printed(const evaluate::options& o, const std::string& modes) {
  std::ostringstream out, said;
  kvmeld::llama::run_tables(o, paths::gguf(), parse_modes(modes), out, said);
  return out.str();
}

/// What stands between the bars of each line.
std::vector<std::vector<std::string>> rows_of(const std::string& table) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream in(table);
  for (std::string line; std::getline(in, line);) {
    REQUIRE((line.starts_with("| ") && line.ends_with(" |")));
    auto& row = rows.emplace_back();
    for (std::size_t at = 2; at < line.size();) {
      const std::size_t bar = line.find(" |", at);
      row.push_back(line.substr(at, bar - at));
      at = bar + 3;
    }
  }
  return rows;
}

/// Nats a token, and the divergence from the full cache, by our own engine in float.
struct stream_figures {
  double nll = 0, divergence = 0;
};

stream_figures by_our_engine(const bundled& m, const evaluate::options& o, const std::string& name,
                             index_t slots) {
  const auto text = m.tokens.encode(m.text());
  const auto length = static_cast<std::size_t>(o.prompt), first = length / 4;
  const auto p = policy_named(name.substr(0, name.find('+')));
  const auto limit = kvmeld::llama::budget_of(p, slots, name.ends_with("+equal"));
  stream_figures f;
  for (std::size_t i = 0; i < 2; ++i) {
    const auto part = std::span(text).subspan(i * ((text.size() - length) / 2), length);
    const auto whole = full_logits(m.ours, part);
    chunked_engine ours(m.ours, p, {limit}, o.prompt + 64);
    for (std::size_t at = 0; at < length; at += 64) {
      const auto logits = ours.decode(part.subspan(at, 64));
      if (limit.is_shared) {
        ours.end_prompt();
      }
      for (std::size_t j = std::max(at, first); j < std::min(at + 64, length - 1); ++j) {
        const auto shares = [](auto row) -> Eigen::ArrayXd {
          const Eigen::ArrayXd x = row.template cast<double>().transpose().array();
          return x - x.maxCoeff() - std::log((x - x.maxCoeff()).exp().sum());
        };
        const Eigen::ArrayXd mine = shares(logits.row(static_cast<Eigen::Index>(j - at))),
                             full = shares(whole.row(static_cast<Eigen::Index>(j)));
        f.nll -= mine[part[j + 1]];
        f.divergence += (full.exp() * (full - mine)).sum();
      }
    }
  }
  const double counted = 2 * static_cast<double>(length - 1 - first);
  return {f.nll / counted, f.divergence / counted};
}

TEST_CASE("llama.cpp: the table has the full cache first, then budgets, policies and modes") {
  const bundled m;
  const auto o = few_cases("streaming_llm,fold");
  const std::string table = printed(o, "repack,own");
  CHECK(table.starts_with(
      "| policy | mode | slots | needle, % | decoded needle, % | stream nll | KL to the full "
      "cache | cells |\n|---|---|---|---|---|---|---|---|\n| full_cache | – | 256 | "));
  const auto rows = rows_of(table.substr(table.find("| full_cache")));
  REQUIRE(rows.size() == 1 + 2 * 3 * 2);
  std::size_t at = 1;
  for (const std::string slots : {"64", "32"}) {
    for (const std::string name : {"streaming_llm", "fold", "fold+equal"}) {
      for (const std::string how : {"repack", "own"}) {
        CHECK((rows[at][0] == name && rows[at][1] == how && rows[at][2] == slots));
        ++at;
      }
    }
  }
  for (const auto& row : rows) {
    REQUIRE(row.size() == 8);
    for (const std::string& share : {row[3], row[4]}) {
      CHECK((share == "0" || share == "50" || share == "100"));
    }
  }
  const auto number = [&](std::size_t row, std::size_t column) {
    return std::stod(rows[row][column]);
  };
  const std::size_t nll = 5, divergence = 6, cells = 7;
  const auto full = by_our_engine(m, o, "full_cache", 256);
  CHECK(std::abs(full.divergence) < 1e-6);
  CHECK(std::abs(number(0, nll) - full.nll) < 1e-3);
  CHECK(rows[0][divergence] == "0.0000");
  CHECK(rows[0][cells] == "256");
  CHECK((rows[0][3] == "100" && rows[0][4] == "100"));
  for (at = 1; at < rows.size(); ++at) {
    const auto& row = rows[at];
    CAPTURE(row);
    const bool own = row[1] == "own";
    const auto wanted = by_our_engine(m, o, row[0], std::stoi(row[2]));
    CHECK(std::abs(number(at, nll) - wanted.nll) < 2e-3);
    CHECK(std::abs(number(at, divergence) - wanted.divergence) < 1e-3);
    const bool shared = row[0] == "fold";  // repack holds the cells of the longest head
    CHECK((own      ? number(at, cells) == 1
           : shared ? number(at, cells) >= number(at, 2) && number(at, cells) < 256
                    : number(at, cells) <= number(at, 2) && number(at, cells) > number(at, 2) / 2));
    if (own) {  // repack stands above it
      CHECK(std::abs(number(at, nll) - number(at - 1, nll)) < 2e-3);
      CHECK(std::abs(number(at, divergence) - number(at - 1, divergence)) < 1e-3);
    }
    // A window of 32 or 64 tokens holds no fact of the first tenth; fold's 64 slots of every head
    // do.
    CHECK((row[0] != "streaming_llm" || row[4] == "0"));
    CHECK((row[0] != "fold+equal" || row[2] != "64" || row[4] == "100"));
  }
}

TEST_CASE("llama.cpp: the table's modes and policies are refused by what was expected") {
  CHECK(parse_modes("repack") == std::vector{mode::repack});
  CHECK(parse_modes("own,repack") == std::vector{mode::own_attention, mode::repack});
  CHECK_THROWS_WITH(parse_modes("repack,other"),
                    "MODES: expected repack, own or repack,own, got 'other'");
  CHECK_THROWS_WITH(parse_modes(""), "MODES: expected repack, own or repack,own");
  for (const std::string name : {"h2o+pyramid_kv", "fold@lookahead"}) {
    CHECK_THROWS_WITH(printed(few_cases(name), "repack"),
                      Catch::Contains("--policies: expected a name and parameters"));
  }
  auto o = few_cases("h2o");
  o.prompt = 1 << 20;
  CHECK_THROWS_WITH(printed(o, "repack"), Catch::Contains("--text: expected at least"));
}

}  // namespace tables_test
