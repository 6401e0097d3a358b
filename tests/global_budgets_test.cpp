// SPDX-License-Identifier: MIT
// Budgets by one threshold over a model, and profiles of them.
#include <catch2/catch.hpp>
#include <numeric>
#include <sstream>

#include "kvmeld/compress/budgets.hpp"
#include "oracle/budgets.hpp"
#include "support/fixtures.hpp"

namespace global_budgets_test {

using fixtures::index_t;
using kvmeld::budget_profile;

index_t sum(const std::vector<index_t>& budget) {
  return std::accumulate(budget.begin(), budget.end(), index_t{0});
}
index_t below(index_t n) {
  return std::uniform_int_distribution<index_t>(0, n - 1)(fixtures::random_bits());
}

/// Scores `[heads, slots]` of very different heads, with ties, NaN and zeros of both signs.
std::vector<float> random_scores(index_t heads, index_t slots, bool ties) {
  std::vector<float> all;
  for (index_t h = 0; h < heads; ++h) {
    const float scale = std::exp(fixtures::normal(1, 2)[0]);
    for (const float x : fixtures::normal(slots)) {
      const float s = scale * std::exp(x);
      all.push_back(below(40) == 0   ? std::nanf("")
                    : below(40) == 0 ? -0.0F
                    : ties           ? std::floor(2 * s)
                                     : s);
    }
  }
  return all;
}

std::string saved(const budget_profile& profile) {
  std::ostringstream out;
  kvmeld::save(out, profile);
  return out.str();
}

TEST_CASE("budgets by one threshold are the oracle's and sum exactly", "[oracle][budgets]") {
  for (int trial = 0; trial < 500; ++trial) {
    const index_t heads = 1 + below(9), slots = 1 + below(60), most = 1 + below(slots + 5);
    const index_t total = below(heads * std::min(most, slots) + 1);
    const auto scores = random_scores(heads, slots, trial % 2 == 0);
    oracle::mat rows;
    for (index_t h = 0; h < heads; ++h) {
      rows.emplace_back(scores.begin() + h * slots, scores.begin() + (h + 1) * slots);
    }
    INFO("trial " << trial << ": " << heads << " heads of " << slots << ", most " << most
                  << ", total " << total);
    const auto budget = kvmeld::global_budgets(scores, heads, total, most);
    REQUIRE(sum(budget) == total);
    REQUIRE(budget == oracle::global_budgets(rows, total, most));
    for (const index_t b : budget) {
      REQUIRE(b <= most);
    }
  }
}

TEST_CASE("equal scores go to the lower head, then to the lower slot", "[budgets]") {
  const std::vector<float> scores = {1, 2, 2, 2, 1, 2};
  CHECK(kvmeld::global_budgets(scores, 2, 3) == std::vector<index_t>{2, 1});
  CHECK(kvmeld::global_budgets(scores, 3, 5) == std::vector<index_t>{2, 2, 1});
  CHECK(kvmeld::global_budgets(scores, 2, 3, 1 + 1) == std::vector<index_t>{2, 1});
  CHECK(kvmeld::global_budgets(scores, 2, 0) == std::vector<index_t>{0, 0});
}

TEST_CASE("a threshold takes of each head no more than its own most", "[oracle][budgets]") {
  for (int trial = 0; trial < 500; ++trial) {
    const index_t heads = 1 + below(6), slots = 1 + below(20);
    std::vector<float> scores;
    for (index_t i = 0; i < heads * slots; ++i) {
      scores.push_back(static_cast<float>(below(30)));  // with ties
    }
    std::vector<index_t> most;
    index_t all = 0;
    for (index_t h = 0; h < heads; ++h) {
      most.push_back(below(slots + 3));
      all += std::min(most.back(), slots);
    }
    const index_t total = below(all + 1);
    // One by one: the best slot of those whose head may have more.
    std::vector<index_t> wanted(static_cast<std::size_t>(heads));
    std::vector<char> taken(scores.size());
    for (index_t n = 0; n < total; ++n) {
      std::size_t best = scores.size();
      for (std::size_t i = 0; i < scores.size(); ++i) {
        const std::size_t h = i / static_cast<std::size_t>(slots);
        if (taken[i] == 0 && wanted[h] < most[h] &&
            (best == scores.size() || scores[i] > scores[best])) {
          best = i;
        }
      }
      taken[best] = 1, ++wanted[best / static_cast<std::size_t>(slots)];
    }
    REQUIRE(kvmeld::global_budgets(scores, total, most) == wanted);
  }
}

TEST_CASE("a profile of one prompt gives its budgets back", "[budgets]") {
  for (int trial = 0; trial < 300; ++trial) {
    const index_t heads = 1 + below(100), slots = 1 + below(300), most = slots;
    const index_t total = 1 + below(heads * slots);
    const auto scores = random_scores(heads, slots, trial % 3 == 0);
    const auto budget = kvmeld::global_budgets(scores, heads, total, most);
    budget_profile profile(heads);
    profile.add(budget);
    REQUIRE(profile.budgets(total, most) == budget);
    const index_t other = below(heads * slots + 1);
    const auto of_other = profile.budgets(other, most);
    REQUIRE(sum(of_other) == other);
    REQUIRE(std::ranges::all_of(of_other, [&](index_t b) { return b >= 0 && b <= most; }));
  }
}

TEST_CASE("a profile is the mean of its prompts, and what heads cannot take goes to the others",
          "[budgets]") {
  budget_profile profile(3);
  profile.add(std::vector<index_t>{8, 2, 0});
  profile.add(std::vector<index_t>{4, 6, 0});
  CHECK(profile.budgets(10, 100) == std::vector<index_t>{6, 4, 0});
  CHECK(profile.budgets(10, 5) == std::vector<index_t>{5, 5, 0});
  CHECK(profile.budgets(12, 5) == std::vector<index_t>{5, 5, 2});
}

TEST_CASE("slots by errors go as their roots, and no head is left without the least", "[budgets]") {
  budget_profile profile(4);
  CHECK(!profile.has_errors());
  profile.add_errors(std::vector<double>{1, 0, 4, 16});
  profile.add_errors(std::vector<double>{3, 0, 5, 0});
  CHECK(profile.has_errors());  // of 4, 0, 9, 16: 2 : 0 : 3 : 4
  CHECK(profile.by_errors(90, 0, 100) == std::vector<index_t>{20, 0, 30, 40});
  CHECK(profile.by_errors(92, 2, 100) == std::vector<index_t>{20, 2, 30, 40});
  CHECK(profile.by_errors(90, 2, 30) == std::vector<index_t>{28, 2, 30, 30});
  // LAW: of all ways to divide n slots, none has a smaller sum of errors / slots.
  const auto best = profile.by_errors(9, 0, 9);
  const auto sum = [&](index_t a, index_t b, index_t c) { return 4.0 / a + 9.0 / b + 16.0 / c; };
  for (index_t a = 1; a <= 7; ++a) {
    for (index_t b = 1; a + b <= 8; ++b) {
      CHECK(sum(best[0], best[2], best[3]) <= sum(a, b, 9 - a - b));
    }
  }
}

TEST_CASE("a profile is saved and loaded", "[budgets]") {
  budget_profile profile(4);
  profile.add(std::vector<index_t>{7, 0, 1 << 30, 3});
  profile.add(std::vector<index_t>{7, 0, 1 << 30, 3});
  profile.add_errors(std::vector<double>{0.5, 0, 1e-9, 3});
  const std::string bytes = saved(profile);
  CHECK(bytes.size() == 8 + 4 + 4 + 4 * (8 + 8) + 4);
  CHECK(bytes.substr(0, 20) == std::string("kvprof\r\n\2\0\0\0\4\0\0\0\16\0\0\0", 20));
  std::istringstream in(bytes);
  budget_profile loaded(4);
  kvmeld::load(in, loaded);
  CHECK(loaded == profile);
}

TEST_CASE("a profile that was changed is refused, with nothing changed", "[errors][budgets]") {
  using Catch::Contains;
  budget_profile profile(2);
  profile.add(std::vector<index_t>{5, 6});
  profile.add_errors(std::vector<double>{0.5, 0.25});
  const std::string bytes = saved(profile);
  budget_profile kept(2);
  kept.add(std::vector<index_t>{1, 2});
  const budget_profile before = kept;
  for (std::size_t i = 0; i < bytes.size(); ++i) {  // every byte, and every end too early
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 0x40);
    std::istringstream in(changed), shorter(bytes.substr(0, i));
    INFO("byte " << i);
    CHECK_THROWS_AS(kvmeld::load(in, kept), kvmeld::error);
    CHECK_THROWS_WITH(kvmeld::load(shorter, kept), Contains("truncated"));
    CHECK(kept == before);
  }
  budget_profile three(3);
  std::istringstream in(bytes), other("something else, long enough");
  CHECK_THROWS_WITH(kvmeld::load(in, three), Contains("expected a profile of 3 heads, got 2"));
  CHECK_THROWS_WITH(kvmeld::load(other, three),
                    Contains("expected a saved profile, got other bytes"));
  std::ostringstream failed;
  failed.setstate(std::ios::badbit);
  CHECK_THROWS_WITH(kvmeld::save(failed, profile),
                    Contains("expected a stream that takes all bytes, got a failed one"));
}

TEST_CASE("budgets by one threshold that cannot be are refused", "[errors][budgets]") {
  using Catch::Contains;
  const std::vector<float> s = {1, 2, 3, 4};
  CHECK_THROWS_WITH(kvmeld::global_budgets(s, 3, 1),
                    Contains("expected scores [3, slots], got 4 numbers"));
  CHECK_THROWS_WITH(kvmeld::global_budgets(s, 2, 5), Contains("expected 0 to 4 slots, got 5"));
  CHECK_THROWS_WITH(kvmeld::global_budgets(s, 2, 3, 1), Contains("expected 0 to 2 slots, got 3"));
  CHECK_THROWS_WITH(kvmeld::global_budgets(s, 2, 3, 0), Contains("at least 1 slot per head"));
  budget_profile profile(2);
  CHECK_THROWS_WITH(profile.budgets(3, 9), Contains("got an empty one"));
  CHECK_THROWS_WITH(profile.add(std::vector<index_t>{1}), Contains("of 2 heads, got 1"));
  CHECK_THROWS_WITH(profile.add(std::vector<index_t>{1, -1}), Contains("got -1"));
  CHECK_THROWS_WITH(profile.by_errors(9, 2, 5), Contains("budget_profile: expected errors"));
  profile.add_errors(std::vector<double>{1, 0});
  CHECK_THROWS_WITH(profile.by_errors(11, 2, 5), Contains("4 to 10 slots for 2 shares"));
  CHECK_THROWS_WITH(profile.add_errors(std::vector<double>{1}), Contains("of 2 heads, got 1"));
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_WITH(profile.add_errors(std::vector<double>{1, bad}),
                      Contains("expected finite errors of at least 0"));
  }
  CHECK(profile.errors()[0] == 1);
  CHECK_THROWS_WITH(budget_profile(0), Contains("expected at least 1 head, got 0"));
}

}  // namespace global_budgets_test
