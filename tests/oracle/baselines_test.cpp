// SPDX-License-Identifier: MIT
// Holds the oracle's baselines against tiny cases by hand and against what must hold of all.
#include <catch2/catch.hpp>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"

namespace oracle_baselines_test {

using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::tensor;
using oracle::vec;

/// One head with one-dimensional keys; scale 1, so that logits are q k.
head line(const vec& keys) {
  head h = oracle::make_head(1, 1, 1);
  for (double k : keys) append(h, {k}, {k});
  return h;
}

const double ln2 = std::log(2.0);

/// After a prompt and each step: the budget holds, sinks and window are there.
template <class Policy>
void keeps_its_promises(const Policy& policy, int sinks, int window) {
  const int target = 24;
  head h = oracle::make_head(4, 2);
  tensor queries;
  for (int t = 0; t < 80; ++t) {
    append(h, normal(4), normal(4));
    queries.push_back(normal(2, 4));
  }
  head twin = h, small = h;
  policy.prompt(small, queries, {}, 80);
  CHECK(small.slots.size() == 80);
  policy.prompt(h, queries, {}, target);
  policy.prompt(twin, queries, {}, target);
  for (int t = 0; t < 50; ++t) {
    REQUIRE(h.slots.size() == static_cast<std::size_t>(target));
    CHECK(oracle::set_difference(h, twin) == 0);
    const std::vector<int> at = positions(h);
    for (int s = 0; s < sinks; ++s) CHECK(std::count(at.begin(), at.end(), s) == 1);
    for (int r = 0; r < window; ++r) CHECK(std::count(at.begin(), at.end(), 79 + t - r) == 1);
    const mat q = normal(2, 4);
    const vec k = normal(4), v = normal(4);
    head whole = h;
    append(whole, k, v);
    const mat expected = attend(whole, q).output;
    CHECK(oracle::difference(policy.step(h, q, k, v, target), expected) < 1e-15);
    policy.step(twin, q, k, v, target);
  }
  for (int t = 0; t < 20; ++t) policy.step(h, normal(2, 4), normal(4), normal(4), target, 34);
  CHECK(h.slots.size() == static_cast<std::size_t>(target));
}

TEST_CASE("baselines keep what they must and come back to the budget", "[oracle]") {
  keeps_its_promises(oracle::random_tokens{.window = 8}, 4, 8);
  keeps_its_promises(oracle::key_diff{.sinks = 2, .window = 3}, 2, 3);
  keeps_its_promises(oracle::expected_attention{.future = 8}, 4, 0);
  keeps_its_promises(oracle::centroids{.window = 6}, 4, 6);
  keeps_its_promises(oracle::compactor{.chunk = 30}, 4, 4);
  keeps_its_promises(oracle::tova{}, 4, 0);
  keeps_its_promises(oracle::scissorhands{.history = 7}, 4, 10);
  keeps_its_promises(oracle::roco{.window = 5}, 4, 5);
  keeps_its_promises(oracle::r_kv{.window = 5}, 4, 5);
  keeps_its_promises(oracle::triattention{.window = 2}, 4, 2);
  keeps_its_promises(oracle::cam{.merge = 5}, 4, 20);
}

TEST_CASE("random tokens: splitmix64 of seed and position", "[oracle]") {
  // The generator's first outputs for seed 0 are published: e220a8397b1dcdaf, 6e789e6aa1b965f4.
  CHECK(oracle::unit_random(0, 0) == 0);
  CHECK(oracle::unit_random(0, 1) == static_cast<double>(0xe220a8) / 0x1000000);
  CHECK(oracle::unit_random(0, 2) == static_cast<double>(0x6e789e) / 0x1000000);
  double mean = 0;
  for (int p = 0; p < 4000; ++p) mean += oracle::unit_random(7, p) / 4000;
  CHECK(mean == Approx(0.5).margin(0.02));
  head h = line(vec(200, 0.0)), other = h;
  oracle::random_tokens{.sinks = 0, .window = 0, .seed = 1}.prompt(h, {}, {}, 50);
  oracle::random_tokens{.sinks = 0, .window = 0, .seed = 2}.prompt(other, {}, {}, 50);
  CHECK(positions(h) != positions(other));
}

TEST_CASE("KeyDiff keeps the keys that point away from the mean", "[oracle]") {
  head h = oracle::make_head(2);
  for (const vec& k : mat{{5, 0}, {1, 0.1}, {0, 0.1}, {3, 0}, {-0.2, 0}}) append(h, k, k);
  // unit keys sum to about (2, 1): cosines .89, .93, .44, .89, -.89
  oracle::key_diff{.sinks = 0}.prompt(h, {}, {}, 3);
  CHECK(positions(h) == std::vector<int>{0, 2, 4});
}

TEST_CASE("Expected Attention is the expectation over a Gaussian of queries", "[oracle]") {
  // One position to come: then mu and Sigma are those of the queries rotated there.
  head h = oracle::make_head(2, 1, 1);
  for (const vec& k : mat{{1, 0}, {0, 1}, {-1, 0.5}, {2, 2}}) append(h, k, {3, 4});
  const oracle::expected_attention policy{.sinks = 0, .future = 1};
  const mat q = {{0.3, 0.1}, {0.5, -0.7}, {-0.2, 0.4}};
  std::vector<int> at = {1, 2, 3};
  for (std::size_t i = 0; i < 3; ++i) policy.observe(h, {q[i]}, at[i]);
  CHECK(h.moments.count == 3);
  const vec s = policy.score(h, {false, false, false, true});
  mat moved;
  for (std::size_t i = 0; i < 3; ++i) moved.push_back(oracle::rotated(q[i], 4 - at[i], {}));
  vec l;
  for (std::size_t j = 0; j < 3; ++j) {
    double mean = 0, squares = 0;
    for (const vec& x : moved) mean += oracle::dot(x, h.slots[j].key) / 3;
    for (const vec& x : moved) squares += std::pow(oracle::dot(x, h.slots[j].key) - mean, 2) / 3;
    l.push_back(std::exp(mean + squares / 2));
  }
  for (std::size_t j = 0; j < 3; ++j) CHECK(s[j] == Approx(5 * l[j] / (l[0] + l[1] + l[2])));
  CHECK(s[3] == 0);
  SECTION("the mean rotation over many positions is nearly zero") {
    const mat r = oracle::expected_attention{.future = 628}.mean_rotation(h);
    CHECK(std::abs(r[0][0]) < 0.01);
    const mat two = oracle::expected_attention{.future = 2}.mean_rotation(h);
    CHECK(two[0][0] == Approx((std::cos(4.0) + std::cos(5.0)) / 2));
    CHECK(two[1][0] == Approx((std::sin(4.0) + std::sin(5.0)) / 2));
  }
}

TEST_CASE("centroids by hand", "[oracle]") {
  head h = line({9, 0, 10, 0.3, 10.4, 0.6, 5});
  h.slots[1].log_mass = ln2;
  const oracle::centroids policy{.sinks = 1, .window = 1};
  policy.prompt(h, {}, {}, 4);
  REQUIRE(positions(h) == std::vector<int>{0, 1, 3, 6});  // seeds: numbers 0 and 2 of the five
  const head sorted = by_position(h);
  // {0 (twice), 0.3} and {10, 10.4, 0.6} cannot be: Lloyd moves the second seed's centre, but the
  // seed itself, 0.3, stays in its cluster.
  CHECK(sorted.slots[1].key[0] == Approx((2 * 0.0 + 0.6) / 3));
  CHECK(sorted.slots[1].log_mass == Approx(std::log(3.0)));
  CHECK(sorted.slots[2].key[0] == Approx((0.3 + 10 + 10.4) / 3));
  CHECK(sorted.slots[2].value[0] == sorted.slots[2].key[0]);
  CHECK(sorted.slots[2].log_mass == Approx(std::log(3.0)));
  policy.step(h, {{0}}, {1}, {1}, 4);  // 5 passes the window, and is nearest to 6.9
  CHECK(positions(h) == std::vector<int>{0, 1, 3, 7});
  CHECK(by_position(h).slots[2].key[0] == Approx((0.3 + 10 + 10.4 + 5) / 4));
  CHECK(by_position(h).slots[2].log_mass == Approx(std::log(4.0)));
}

TEST_CASE("centroids move by the tokens that a slot stands for", "[oracle]") {
  head h = line({0, 3, 4, 10});
  h.slots[3].log_mass = 2 * ln2;  // four tokens: the mean of {3, 4, 10} is not at 3
  oracle::centroids{.sinks = 0, .window = 0}.prompt(h, {}, {}, 2);
  CHECK(positions(h) == std::vector<int>{0, 2});
  CHECK(h.slots[0].key[0] == Approx(1.5));
  CHECK(h.slots[1].key[0] == Approx((4 + 4 * 10) / 5.0));
}

TEST_CASE("Compactor: leverage and attention within chunks", "[oracle]") {
  CHECK(oracle::difference(oracle::compactor::standardised({1, 2, 3}), vec{-1, 0, 1}) < 1e-15);
  CHECK(oracle::compactor::standardised({4}) == vec{0});
  const oracle::compactor alone{.sinks = 0, .window = 0, .blend = 1e9};
  head h = oracle::make_head(2, 1, 1);
  for (int t = 0; t < 6; ++t) {  // equal before rotation but for the third
    const vec k = t == 2 ? vec{-1, 3} : vec{1, 1 + 0.01 * t};
    append(h, oracle::rotated(k, t, {}), {1, 0});
  }
  head one = h;
  alone.prompt(one, {}, {}, 1);
  CHECK(positions(one) == std::vector<int>{2});
  SECTION("a query sees its chunk, what comes after it included, and no more") {
    head a = line({0, 0, 1, 0, 0, 1});
    for (auto& s : a.slots) s.value = {1};
    tensor queries(6, mat{{0}});
    queries[0] = {{10}};  // attends to slot 2 (of its chunk), not for 5
    const oracle::compactor policy{.sinks = 0, .window = 0, .chunk = 3, .blend = 0};
    // received: 2/3 2/3 5/3 1 1 1; the sums of three are largest around slot 3
    policy.prompt(a, queries, {}, 1);
    CHECK(positions(a) == std::vector<int>{3});
  }
}

TEST_CASE("TOVA goes by the last query alone", "[oracle]") {
  head h = line({0, 3, 1, 2});
  const oracle::tova policy{.sinks = 0};
  policy.prompt(h, {{{-9}}, {{1}}}, {}, 3);
  CHECK(positions(h) == std::vector<int>{1, 2, 3});
  policy.step(h, {{-1}}, {1.5}, {0}, 3);  // now the smallest keys are asked for
  CHECK(positions(h) == std::vector<int>{2, 3, 4});
  policy.step(h, {{1}}, {0}, {0}, 3);  // the new token competes too
  CHECK(positions(h) == std::vector<int>{2, 3, 4});
}

TEST_CASE("Scissorhands counts low marks", "[oracle]") {
  // Logits 0 or ln 2. Of the two queries at 2 and 3, the first sees three slots and marks those
  // below 1/3, the second four and those below 1/4.
  head h = line({0, 1, 0, 1});
  const oracle::scissorhands policy{.sinks = 0, .window = 1, .history = 3};
  head kept = h;
  policy.prompt(kept, {{{ln2}}, {{-ln2}}}, {}, 4);
  const auto marks = [](const head& x) {
    vec m;
    for (const auto& s : x.slots) m.push_back(s.past + s.current);
    return m;
  };
  CHECK(marks(kept) == vec{1, 1, 1, 1});  // 1/4 1/2 1/4; 1/3 1/6 1/3 1/6
  policy.step(kept, {{ln2}}, {1}, {1}, 4);
  CHECK(marks(kept) == vec{2, 1, 1, 0});
  CHECK(positions(kept) ==
        std::vector<int>{0, 1, 3, 4});  // 0 and 2 have two: the higher is evicted
  SECTION("a window that is full becomes the one before") {
    policy.step(kept, {{0}}, {0}, {0}, 10);
    CHECK(kept.queries_seen == 2);
    policy.step(kept, {{0}}, {0}, {0}, 10);  // equal attention is not low
    CHECK(kept.queries_seen == 0);
    CHECK(kept.slots[0].past == 1);
    CHECK(kept.slots[0].current == 0);
  }
}

TEST_CASE("RoCo: the mean per query, and the restless stay", "[oracle]") {
  head h = line({0, 0, 0});
  const oracle::roco policy{.sinks = 0, .window = 1, .steady = 0.5};
  policy.observe(h, {{1}}, 1);  // 1/2 1/2
  policy.observe(h, {{1}}, 2);  // 1/3 each
  CHECK(oracle::roco::mean(h.slots[0]) == Approx((0.5 + 1 / 3.0) / 2));
  CHECK(oracle::roco::deviation(h.slots[0]) == Approx((0.5 - 1 / 3.0) / 2));
  CHECK(oracle::roco::mean(h.slots[2]) == Approx(1 / 3.0));
  CHECK(oracle::roco::deviation(h.slots[2]) == Approx(0).margin(1e-6));
  for (int t = 0; t < 3; ++t) append(h, {0}, {0});
  const vec score = {4, 1, 3, 2, 5, 0}, squares = {4, 2, 2.25, 1, 6.25, 0};
  for (std::size_t j = 0; j < 6; ++j) {
    h.slots[j].observed = 4;
    h.slots[j].score = score[j];
    h.slots[j].squares = squares[j];
  }
  policy.evict_to(h, 4);  // kept: 5 (recent), 1 (deviation), then 4 and 0 by mean
  CHECK(positions(h) == std::vector<int>{0, 1, 4, 5});
}

TEST_CASE("R-KV: what others say as well goes, but for the latest that says it", "[oracle]") {
  head h = oracle::make_head(2, 1, 1);
  for (const vec& k : mat{{2, 0}, {1, 0}, {0, 1}, {3, 0}, {0, 0}}) append(h, k, k);
  const oracle::r_kv policy{.sinks = 0, .window = 1, .kernel = 1};
  // Each of the three that point alike misses its cosine with the last of the others.
  const vec r = policy.redundancy(h), mean = {0.4, 0.2, 0, 0, 0};
  double sum = 0;
  for (double m : mean) sum += std::exp(m);
  for (std::size_t j = 0; j < 5; ++j) CHECK(r[j] == Approx(std::exp(mean[j]) / sum));
  policy.observe(h, {{ln2, 0}}, 4);
  const vec i = policy.importance(h);
  const vec wanted = {4 / 15.0, 2 / 15.0, 1 / 15.0, 8 / 15.0, 0};  // slot 4 is the window
  for (std::size_t j = 0; j < 5; ++j) CHECK(i[j] == Approx(wanted[j]));
  head kept = h;
  policy.evict_to(kept, 4);
  CHECK(positions(kept) == std::vector<int>{1, 2, 3, 4});
  SECTION("the largest of the neighbours, of the group, and the mean over queries") {
    policy.observe(h, {{0, 0}}, 4);  // the window is one query: it takes the other's place
    for (std::size_t j = 0; j < 4; ++j) CHECK(policy.importance(h)[j] == Approx(0.25));
    const oracle::r_kv wide{.sinks = 0, .window = 2, .kernel = 3};  // 0, 1 and 2 are outside
    h.memory.queries = {{3, {{ln2, 0}, {0, 2 * ln2}}}, {4, {{0, 0}, {0, 0}}}};
    const vec w = wide.importance(h);  // 4 2 4 of 10, and 1 1 1 of 3
    for (std::size_t j = 0; j < 3; ++j) CHECK(w[j] == Approx((0.4 + 1 / 3.0) / 2));
  }
}

TEST_CASE("TriAttention: the mean's own logits, and more where queries vary", "[oracle]") {
  head h = oracle::make_head(2, 1, 1);
  for (const vec& k : mat{{1, 0.5}, {-0.3, 2}}) append(h, k, k);
  const oracle::triattention policy{.sinks = 0, .calibrated = {{{0.7, -0.2}, {1.5}}}};
  double mean = 0;
  for (int i = 0; i <= 16; ++i)
    mean += oracle::dot(oracle::rotated({0.7, -0.2}, 1 + (1 << i), {}), h.slots[0].key) / 17;
  const double more = (1.5 - std::hypot(0.7, 0.2)) * std::hypot(1, 0.5);
  CHECK(policy.raw(h, policy.measured(h, 0), h.slots[0]) == Approx(mean + more));
  const vec s = policy.score(h, {false, false});
  CHECK(s[0] == Approx(-s[1]));
  CHECK(std::abs(s[0]) == Approx(1));
}

TEST_CASE("CaM: the value that leaves is added to those that follow, at random", "[oracle]") {
  head h = line({1, 2, 4, 8, 16});
  const vec attention = {5, 1, 3, 9, 6};  // of the present step
  for (std::size_t j = 0; j < 5; ++j) h.slots[j].score = attention[j];
  int merged = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    head one = h;
    oracle::cam{.sinks = 1, .merge = 2, .seed = seed}.evict_to(one, 4);
    REQUIRE(positions(one) == std::vector<int>{0, 2, 3, 4});
    CHECK(one.slots[0].value[0] == 1);
    CHECK(one.slots[3].value[0] == 16);
    const bool did = oracle::unit_random(seed, 1) < 1 / 6.0;  // 1 over the mean of 3, 9 and 6
    CHECK(one.slots[1].value[0] == (did ? 5 : 4));
    CHECK(one.slots[2].value[0] == (did ? 9 : 8));
    for (const auto& s : one.slots) CHECK(s.log_mass == 0);
    merged += did ? 1 : 0;
  }
  CHECK(merged == Approx(400 / 6.0).margin(25));
  head dropped = h;
  oracle::cam{.sinks = 0}.prompt(dropped, {}, {}, 4);  // a prompt only drops
  for (const auto& s : dropped.slots) CHECK(s.value == s.key);
}

}  // namespace oracle_baselines_test
