// SPDX-License-Identifier: MIT
// Holds the oracle's EMS against tiny cases by hand and against what must hold of it.
#include <catch2/catch.hpp>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"

namespace oracle_ems_test {

using oracle::ems;
using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::random_head;
using oracle::random_queries;
using oracle::tensor;
using oracle::vec;

TEST_CASE("EMS by hand: one entry for two tokens, each with its norm", "[oracle]") {
  head h = oracle::make_head(2, 1, 1);
  append(h, {3, 0}, {1, 1});
  append(h, {0, 2}, {0, 5});
  append(h, {1, 0}, {4, 4});
  append(h, {0, 0.5}, {1, 0});
  const ems policy{.window = 1, .kernel = 1, .sinks = 0};
  const tensor queries = {{{1, 1}}};  // one query, at position 3: glo = loc, so s = a
  const vec a = attend(h, queries[0]).probabilities[0];
  head before = h;
  policy.prompt(h, queries, {}, 3);
  REQUIRE(h.slots.size() == 3);
  REQUIRE(h.slots[0].members.size() == 2);  // (1, 0) is the least and lies along (3, 0)
  CHECK(h.slots[0].members[1].position == 2);
  CHECK(h.slots[0].members[1].norm == 1);
  CHECK(h.slots[0].members[1].glo == Approx(a[2]));
  CHECK(oracle::difference(h.slots[0].key, vec{3, 0}) < 1e-15);
  CHECK(h.slots[0].value[0] == Approx((1 * a[0] + 4 * a[2]) / (a[0] + a[2])));
  CHECK(h.slots[1].value == vec{0, 5});
  // No key has changed its direction, so every query finds the mass it would have found.
  const mat probe = normal(6, 2);
  CHECK(oracle::difference(attend(policy.expanded(h), probe).lse, attend(before, probe).lse) <
        1e-14);
  SECTION("another direction: the mean of the two, the lengths stay") {
    const double c = std::sqrt(0.5);
    before.slots[2].key = {c, c};
    before.slots[2].value = {1, 1};
    const vec b = attend(before, queries[0]).probabilities[0];
    policy.prompt(before, queries, {}, 3);
    const vec u = {b[0] + b[2] * c, b[2] * c};
    REQUIRE(before.slots[0].members.size() == 2);  // both keys at cos 0.71: values decide
    CHECK(before.slots[0].key[1] / before.slots[0].key[0] == Approx(u[1] / u[0]));
    CHECK(ems::norm(before.slots[0].key) == Approx(3));
    CHECK(ems::norm(policy.expanded(before).slots[1].key) == Approx(1));
  }
  SECTION("below the threshold, or alike by two opposites: the zero class") {
    const bool opposite = GENERATE(false, true);
    before.slots[2].key = {opposite ? -1.0 : 1.0, opposite ? 0.0 : 1.0};
    before.slots[2].value = {opposite ? -1.0 : 1.0, opposite ? -1.0 : 0.0};
    policy.prompt(before, queries, {}, 3);
    REQUIRE(before.slots.size() == 3);
    for (const auto& s : before.slots) CHECK(s.members.size() == 1);
    CHECK(before.slots[0].value == vec{1, 1});
  }
}

TEST_CASE("EMS merged un-rotated: tokens that are equal before rotation lose nothing", "[oracle]") {
  // The last of four tokens is local; slots 1 and 2 are one key at two places, slot 2 twice as
  // long.
  const oracle::rope rotation;
  head h = oracle::make_head(4, 1, 1);
  const vec keys[] = {{0, 0, 3, 1}, {1, 2, 0, 0}, {2, 4, 0, 0}, {1, 1, 1, 1}};
  const double values[] = {1, 5, 5, 2};
  for (int t = 0; t < 4; ++t) append(h, oracle::rotated(keys[t], t, rotation), vec(4, values[t]));
  const head before = h;
  const ems policy{.window = 1,
                   .kernel = 1,
                   .sinks = 0,
                   .with_position = false,
                   .merge_unrotated = true,
                   .rotation = rotation};
  const mat probe = normal(6, 4);
  policy.prompt(h, {{{-1, -1, -1, -1}}}, {}, 3);
  REQUIRE(h.slots.size() == 3);
  REQUIRE(h.slots[1].members.size() + h.slots[0].members.size() == 3);
  CHECK(oracle::difference(attend(policy.expanded(h), probe).output, attend(before, probe).output) <
        1e-12);
  SECTION("two directions: their mean before rotation, at the centre's place") {
    head two = before;
    two.slots[2].key = oracle::rotated({2, 4, 1, 0}, 2, rotation);
    const head as_was = two;
    const oracle::slot made = policy.merged(
        [&] {
          ems::list_members(two);
          return two;
        }(),
        1, {2}, {0, 1, 3, 0});
    vec mean(4, 0.0);
    oracle::add(mean, 1 / ems::norm(keys[1]), keys[1]);
    oracle::add(mean, 3 / std::sqrt(21.0), {2, 4, 1, 0});
    const double length = ems::norm(mean);
    for (double& x : mean) x *= ems::norm(keys[1]) / length;
    CHECK(oracle::difference(made.key, oracle::rotated(mean, 1, rotation)) < 1e-14);
    CHECK(oracle::difference(ems{}.merged(two, 1, {2}, {0, 1, 3, 0}).key, made.key) > 1e-2);
  }
}

TEST_CASE("EMS keeps its promises over a prompt and decode", "[oracle]") {
  const double gamma = GENERATE(1.0, 1.5, 4.0);
  const ems policy{.window = 6, .sinks = 2, .gamma = gamma, .threshold = 0.1};
  head h = random_head(90, 4, 2);
  policy.prompt(h, random_queries(90, 2, 4), {}, 20);
  const auto holds = [&] {
    REQUIRE(h.slots.size() == 20);
    std::size_t all = 0;
    for (const auto& s : h.slots) {
      all += s.members.size();
      CHECK(s.members[0].position == s.position);
      CHECK(s.members[0].norm == Approx(ems::norm(s.key)));
      const bool safe = s.position < 2 || s.position > newest(h) - 6;
      if (safe) CHECK(s.members.size() == 1);
    }
    CHECK(static_cast<double>(all) <= std::floor(gamma * 20 + 0.5));
    return all;
  };
  const std::size_t after_prompt = holds();
  CHECK(after_prompt <= 8 + static_cast<std::size_t>(std::lround(gamma * 12)));
  if (gamma > 1) CHECK(after_prompt > 20);
  for (int t = 0; t < 50; ++t) {
    policy.step(h, normal(2, 4), normal(4), normal(4), 20);
    const std::size_t all = holds();
    if (gamma == 1) CHECK(all == 20);
  }
}

TEST_CASE("EMS loses nothing of tokens that are equal but for their norms", "[oracle]") {
  // Six kinds, keys and values at right angles: every kind shares an entry, whatever the scores.
  const ems policy{.window = 4, .sinks = 1, .gamma = 50};
  head h = oracle::make_head(8, 2), full = h;
  const oracle::full_cache whole;
  double weakest = 1;
  for (int t = 0; t < 120; ++t) {
    vec k(8, 0.0), v(8, 0.0);
    k[static_cast<std::size_t>(t % 6)] = 0.5 + std::abs(normal(1)[0]);
    v[static_cast<std::size_t>(t % 6)] = 3;
    const mat q = normal(2, 8);
    const mat ours = policy.step(h, q, k, v, 16), theirs = whole.step(full, q, k, v, 0);
    CHECK(oracle::difference(ours, theirs) < 1e-12);
    double mass = 0;
    for (const auto& s : h.slots) mass += static_cast<double>(s.members.size());
    weakest = std::min(weakest, mass / (t + 1));
  }
  CHECK(weakest == 1);
  CHECK(h.slots.size() == 16);
}

TEST_CASE("EMS scores: eq. 2, pooled, windows, the table's least", "[oracle]") {
  std::vector<oracle::ems_member> m = {{0, 1, 8, 1, 0}, {1, 1, 2, 0, 1}, {2, 1, 2, 3, 1}};
  std::vector<oracle::ems_member*> all = {&m[0], &m[1], &m[2]};
  // mean loc / mean glo = 6/12: max(4, 1), max(1, 1), max(1, 4)
  CHECK(ems::scores(all) == vec{4, 1, 4});
  const ems policy{.window = 1, .kernel = 3};
  CHECK(policy.pooled(all, {4, 1, 7}, 2) == vec{2.5, 2.5, 7});
  SECTION("two windows") {
    const ems short_window{.window = 3, .sinks = 0};
    head h = oracle::make_head(1, 1, 1);
    for (int t = 0; t < 4; ++t) short_window.step(h, {{0}}, {1}, {1}, 10);
    CHECK(h.slots[0].members[0].past == Approx(1 + 0.5 + 1 / 3.0));
    CHECK(h.slots[0].members[0].cur == Approx(0.25));
    CHECK(h.slots[0].members[0].glo == Approx(1 + 0.5 + 1 / 3.0 + 0.25));
  }
  SECTION("the least of those that are no centres makes room") {
    head h = oracle::make_head(1, 1, 1);
    for (int t = 0; t < 2; ++t) append(h, {1}, {1});
    h.slots[0].members = {{0, 1, 0, 0, 0}, {2, 1, 0, 0, 0}, {3, 1, 0, 0, 0}};
    h.slots[1].members = {{1, 1, 0, 0, 0}, {4, 1, 0, 0, 0}};
    ems::make_room(h, {0, 5, 3, 0, 3}, 4);
    CHECK(h.slots[0].members.size() == 3);
    CHECK(h.slots[1].members.size() == 1);  // of equals the later one
    ems::make_room(h, {0, 5, 3, 0}, 3);
    CHECK(h.slots[0].members.back().position == 2);
  }
  SECTION("without position, keys are compared as they were before rotation") {
    oracle::slot a, b;
    a.key = {1, 2, 3, 4};
    a.value = b.value = {1, 0, 0, 0};
    a.position = 3;
    b.position = 40;
    b.key = oracle::rotated(a.key, 37, {});
    CHECK(ems{.with_position = false}.redundancy(a, b) == Approx(1));
    CHECK(ems{}.redundancy(a, b) < 0.9);
  }
}

}  // namespace oracle_ems_test
