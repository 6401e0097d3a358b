// SPDX-License-Identifier: MIT
// Online softmax against one sum in double.
#include "kvmeld/score/softmax.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace softmax_test {

using kvmeld::score::softmax;
constexpr float nothing = -std::numeric_limits<float>::infinity();

/// `ln Σ exp x` in double.
double log_sum_exp(const std::vector<float>& logits) {
  double most = -std::numeric_limits<double>::infinity(), sum = 0;
  for (const float x : logits) {
    most = std::max(most, double{x});
  }
  for (const float x : logits) {
    sum += std::isinf(most) ? 0.0 : std::exp(double{x} - most);
  }
  return most + (sum > 0 ? std::log(sum) : 0);
}

std::vector<float> draw(std::mt19937& random, std::size_t n, float size) {
  std::normal_distribution<float> normal(0, size);
  std::vector<float> logits(n);
  for (float& x : logits) {
    x = random() % 4 == 0 ? nothing : normal(random);
  }
  return logits;
}

void check_near(float now, double expected) {
  if (std::isinf(expected)) {
    CHECK(now == nothing);
  } else {
    CHECK(std::abs(now - expected) <= 2e-6 * (1 + std::abs(expected)));
  }
}

TEST_CASE("a softmax of parts, in any order, is that of the whole row") {
  std::mt19937 random(1);
  for (const float size : {1.0F, 30.0F, 1e4F}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<float> logits = draw(random, 1 + random() % 40, size);
      const double expected = log_sum_exp(logits);
      const auto cut = static_cast<std::ptrdiff_t>(random() % (logits.size() + 1));
      softmax<> one_by_one, rows, first, second;
      for (const float x : logits) {
        one_by_one.add(x);
      }
      const auto row = [&](std::ptrdiff_t begin, std::ptrdiff_t end) {
        return Eigen::Map<Eigen::ArrayXf>(logits.data() + begin, end - begin);
      };
      const auto n = static_cast<std::ptrdiff_t>(logits.size());
      if (cut > 0 && cut < n) {
        const std::vector<float> before = logits;
        auto head = row(0, cut), tail = row(cut, n);
        rows.take(head);
        const float rescale = rows.take(tail);
        // Both parts' exp are below the largest of all, once the first's are rescaled.
        for (std::ptrdiff_t i = 0; i < n; ++i) {
          const auto s = static_cast<std::size_t>(i);
          const double own =
              rows.max == nothing ? 0.0 : std::exp(double{before[s]} - double{rows.max});
          CHECK(std::abs(logits[s] * (i < cut ? rescale : 1.0F) - own) <= 4e-6 * (own + 1e-6));
        }
        check_near(rows.log_sum_exp(), expected);
        for (std::ptrdiff_t i = 0; i < n; ++i) {
          (i < cut ? first : second).add(before[static_cast<std::size_t>(i)]);
        }
        softmax<> other = second;
        other.merge(first);
        first.merge(second);
        check_near(first.log_sum_exp(), expected);
        CHECK(first.max == other.max);
        CHECK(first.sum == other.sum);
      }
      check_near(one_by_one.log_sum_exp(), expected);
    }
  }
}

TEST_CASE("a softmax of nothing is nothing") {
  softmax<> all;
  CHECK(all.log_sum_exp() == nothing);
  all.add(nothing);
  all.merge({});
  CHECK((all.max == nothing && all.sum == 0));
  Eigen::ArrayXf row = Eigen::ArrayXf::Constant(5, nothing);
  CHECK(all.take(row) == 1);
  CHECK((row == 0).all());
  CHECK(all.log_sum_exp() == nothing);
  all.add(3);
  CHECK(all.log_sum_exp() == 3);
  all.merge({});
  CHECK(all.log_sum_exp() == 3);
}

TEST_CASE("what is no number stays none") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  softmax<> one, row;
  one.add(1), one.add(nan), one.add(2);
  CHECK(std::isnan(one.log_sum_exp()));
  Eigen::ArrayXf logits = Eigen::ArrayXf::Constant(40, 1);
  logits[7] = nan;
  row.take(logits);
  CHECK(std::isnan(row.log_sum_exp()));
}

}  // namespace softmax_test
