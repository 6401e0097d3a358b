// SPDX-License-Identifier: MIT
// The oracle's caps, sinks, slopes and windows by hand.
#include "oracle/terms.hpp"

#include <catch2/catch.hpp>

#include "oracle/compare.hpp"
#include "oracle/kvzip.hpp"
#include "oracle/lookahead_max.hpp"
#include "oracle/random.hpp"

namespace terms_test {

using oracle::head;
using oracle::terms;
using oracle::vec;

/// Keys and values of one number each; the query is 1, so that logits are the keys.
head line(const terms& t, const vec& keys, int group = 1) {
  head h = oracle::make_head(1, group, t);
  for (const double k : keys) append(h, {k}, {k});
  return h;
}

TEST_CASE("the oracle's cap bounds a logit and leaves small ones alone", "[oracle]") {
  const terms t{.cap = 30};
  CHECK(t.alike({1}, {0.3}) == Approx(0.3).epsilon(1e-4));
  CHECK(t.alike({1}, {30}) == Approx(30 * std::tanh(1.0)));
  CHECK(t.alike({1}, {1e4}) == Approx(30));
  CHECK(t.alike({1}, {-1e4}) == Approx(-30));
  CHECK((terms{.scale = 2, .cap = 3}.alike({1}, {6})) == Approx(3 * std::tanh(4.0)));
  head h = line(t, {1e4, 2e4});
  h.slots[0].log_mass = std::log(3.0);  // log-mass is added to what is capped
  CHECK(attend(h, {{1}}).probabilities[0][0] == Approx(0.75));
}

TEST_CASE("the oracle's sink takes its share of each query head, and no value", "[oracle]") {
  const head h = line({.sinks = {std::log(2.0), std::log(6.0)}}, {0, 0}, 2);
  const auto r = attend(h, {{1}, {1}});
  CHECK(r.probabilities[0][1] == Approx(0.25));
  CHECK(r.probabilities[1][0] == Approx(0.125));
  CHECK(r.lse[0] == Approx(std::log(4.0)));
  CHECK(r.lse[1] == Approx(std::log(8.0)));
  const auto large = attend(line({.sinks = {1e4}}, {3, 5}), {{1}});
  CHECK((large.output[0][0] == 0 && large.lse[0] == 1e4));
  const auto small = attend(line({.sinks = {-1e4}}, {3, 5}), {{1}});
  CHECK(oracle::difference(small.output, attend(line({}, {3, 5}), {{1}}).output) == 0);
  double lse = 0;
  CHECK(oracle::softmax({1, 2}, {false, false}, lse, 7) == vec{0, 0});  // sees the sink alone
  CHECK(lse == 7);
}

TEST_CASE("the oracle's slopes count positions back from the query's own", "[oracle]") {
  const double ln2 = std::log(2.0);
  const head h = line({.slopes = {ln2, 2 * ln2}}, {0, 0, 0}, 2);
  const auto r = attend(h, {{1}, {1}});
  CHECK(oracle::difference(r.probabilities,
                           {{1.0 / 7, 2.0 / 7, 4.0 / 7}, {1 / 21.0, 4 / 21.0, 16 / 21.0}}) < 1e-15);
  CHECK(r.lse[0] == Approx(std::log(1.75)));
  CHECK(attend(h, {{1}}, 5).lse[0] == Approx(std::log(1.75) - 3 * ln2));
  CHECK(attend(h, {{1}}, 1).probabilities[0][2] == 0);
  CHECK_THROWS_AS(logits_of(h, {1}, 0), std::invalid_argument);
}

TEST_CASE("the oracle's window shows a query its own and the latest before", "[oracle]") {
  const head h = line({.window = 2}, {0, 0, 0, 0});
  CHECK(attend(h, {{1}}).probabilities[0] == vec{0, 0, 0.5, 0.5});
  CHECK(attend(h, {{1}}, 0).probabilities[0] == vec{1, 0, 0, 0});
  const auto sums = column_scores(h, {{{1}}, {{1}}, {{1}}, {{1}}}, {}, {.window = 2});
  CHECK(sums.total == vec{1.5, 1, 1, 0.5});
  CHECK(sums.last == vec{0, 0.5, 1, 0.5});
}

TEST_CASE("the oracle's column sums of a sink fall short of the queries by what it took",
          "[oracle]") {
  const head h = line({.sinks = {0}}, {0, 0});
  const auto sums = column_scores(h, {{{1}}, {{1}}}, {}, {.decay = 0.5});
  CHECK(oracle::difference(sums.total, {0.5 + 1.0 / 3, 1.0 / 3}) < 1e-15);
  CHECK(oracle::difference(sums.decayed, {0.25 + 1.0 / 3, 1.0 / 3}) < 1e-15);
  CHECK(oracle::difference(sums.largest, {0.5, 1.0 / 3}) < 1e-15);
}

TEST_CASE("a sink is once in a lookahead-max, and slopes are of where the query moved",
          "[oracle]") {
  const vec zero(4, 0.0), value{1, 0, 0, 0};
  const oracle::lookahead_max rule{.outliers = false};
  const double ln2 = std::log(2.0);
  head h = oracle::make_head(4, 1, {.sinks = {ln2}});
  append(h, zero, value);
  CHECK(rule(h, {{zero}}, {}, 1)[0] == Approx(1.0 / (1 + (1 + 2))));
  h.terms = {.slopes = {ln2}};  // one position on: half of the mass of the first reading's
  CHECK(rule(h, {{zero}}, {}, 1)[0] == Approx(0.5 / (0.5 + 1)));
  h.terms = {.sinks = {ln2}, .slopes = {ln2}};
  CHECK(rule(h, {{zero}}, {}, 1)[0] == Approx(0.5 / (0.5 + 1 + 2)));
  CHECK(oracle::kvzip::scores(h, {zero}, {{zero}})[0] == Approx(0.5 / (0.5 + 1 + 2)));
}

}  // namespace terms_test
