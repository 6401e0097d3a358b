// SPDX-License-Identifier: MIT
// Rotations of every kind against the formulas that models publish, written out, and refusals.
#include <catch2/catch.hpp>
#include <functional>
#include <numbers>

#include "support/fixtures.hpp"

namespace rotary_formulas_test {

using kvmeld::index_t;
using kvmeld::rotary;
using kvmeld::row;

std::vector<float> rotated(std::vector<float> x, double positions, const rotary& r) {
  r.rotate(row<float>{x.data()}, static_cast<index_t>(x.size()), positions);
  return x;
}

constexpr double tau = 2 * std::numbers::pi;

/// `inv_freq` of transformers' modeling_rope_utils.py, written out: `default`, `linear`, `llama3`.
double plain(double base, int dim, int p) { return 1 / std::pow(base, 2.0 * p / dim); }
double llama3(double base, int dim, int p, double factor, double low, double high,
              double original) {
  const double inv_freq = plain(base, dim, p), wavelen = tau / inv_freq;
  const double smooth = (original / wavelen - low) / (high - low);
  return wavelen > original / low    ? inv_freq / factor
         : wavelen < original / high ? inv_freq
                                     : (1 - smooth) * inv_freq / factor + smooth * inv_freq;
}
/// `yarn`: `find_correction_range` and `linear_ramp_factor`.
double yarn(double base, int dim, int p, double factor, double original, double beta_fast,
            double beta_slow, bool truncate = true) {
  const auto find_correction_dim = [&](double rotations) {
    return dim * std::log(original / (rotations * tau)) / (2 * std::log(base));
  };
  double low = find_correction_dim(beta_fast), high = find_correction_dim(beta_slow);
  low = std::max(truncate ? std::floor(low) : low, 0.0);
  high = std::min(truncate ? std::ceil(high) : high, dim - 1.0);
  high += low == high ? 0.001 : 0;
  const double extrapolation = 1 - std::clamp((p - low) / (high - low), 0.0, 1.0);
  const double f = plain(base, dim, p);
  return f / factor * (1 - extrapolation) + f * extrapolation;
}

struct formula {
  std::string name;
  std::function<rotary(const rotary&)> of;
  std::function<double(double base, int turned, int p)> frequency;
};
const formula formulas[] = {
    {"plain", [](const rotary& r) { return r; }, plain},
    {"linear", [](const rotary& r) { return r.linear(4); },
     [](double base, int dim, int p) { return plain(base, dim, p) / 4; }},
    {"llama3", [](const rotary& r) { return r.llama3({.factor = 32, .low = 1.5, .high = 3}); },
     [](double base, int dim, int p) { return llama3(base, dim, p, 32, 1.5, 3, 8192); }},
    {"yarn", [](const rotary& r) { return r.yarn({.factor = 16}); },
     [](double base, int dim, int p) { return yarn(base, dim, p, 16, 4096, 32, 1); }},
    {"yarn of gpt-oss", [](const rotary& r) { return r.yarn({.factor = 32, .truncate = false}); },
     [](double base, int dim, int p) { return yarn(base, dim, p, 32, 4096, 32, 1, false); }},
    {"yarn of a short context",
     [](const rotary& r) {
       return r.yarn({.factor = 2, .original_context = 16, .fast = 1.5, .slow = 1.4});
     },
     [](double base, int dim, int p) { return yarn(base, dim, p, 2, 16, 1.5, 1.4); }}};

TEST_CASE("every kind of rotation turns as its published formula says", "[rotary]") {
  for (const formula& x : formulas) {
    for (const bool interleaved : {false, true}) {
      for (const double base : {10'000.0, 500'000.0, 50.0}) {
        for (const index_t turned : {2, 64, 128}) {
          for (const index_t dim : {turned, 128, 160}) {
            INFO(x.name << ", base " << base << ", " << turned << " of " << dim);
            const auto all = interleaved ? rotary::interleaved(base) : rotary::halves(base);
            const rotary some = turned == dim ? x.of(all) : x.of(all).dims(turned);
            const bool last = dim == 160;
            const rotary r = last ? some.last() : some;
            const index_t first = last ? dim - turned : 0;
            REQUIRE((r.rotated(dim) == turned && r.first(dim) == first && (r == some) == !last));
            std::vector<double> at_once(static_cast<std::size_t>(turned / 2));
            r.frequencies(dim, at_once);
            const auto before = fixtures::normal(dim);
            const auto after = rotated(before, 100, r);
            auto by_rotation = before;
            kvmeld::rotation turn(r, dim);
            turn.by(100);
            turn(by_rotation.data());
            for (std::size_t i = 0; i < after.size(); ++i) {
              CHECK(by_rotation[i] == Approx(after[i]).margin(1e-5));
            }
            for (index_t p = 0; p < turned / 2; ++p) {
              const double f = x.frequency(base, turned, p);
              CHECK(r.frequency(p, dim) == Approx(f).epsilon(1e-12));
              CHECK(at_once[static_cast<std::size_t>(p)] == Approx(f).epsilon(1e-12));
              const auto i = static_cast<std::size_t>(first + (interleaved ? 2 * p : p)),
                         j = interleaved ? i + 1 : i + static_cast<std::size_t>(turned / 2);
              const double a = before[i], b = before[j], angle = 100 * f;
              CHECK(after[i] == Approx(a * std::cos(angle) - b * std::sin(angle)).margin(1e-6));
              CHECK(after[j] == Approx(a * std::sin(angle) + b * std::cos(angle)).margin(1e-6));
            }
            for (index_t i = 0; i < dim; ++i) {
              const auto at = static_cast<std::size_t>(i);
              CHECK((after[at] == before[at] || (i >= first && i < first + turned)));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a table's frequencies are taken as they are, and scaled", "[rotary]") {
  const std::vector<double> own{0.5, 0.25, 3, 0};
  for (const auto pairs : {rotary::pairing::halves, rotary::pairing::interleaved}) {
    const rotary r = rotary::table(own, pairs);
    CHECK((r.rotates() && r.pairs_as() == pairs && r.base() == 0));
    CHECK((r.rotated(8) == 8 && r.rotated(20) == 8));
    std::vector<double> all(4);
    r.linear(2).frequencies(20, all);
    for (index_t p = 0; p < 4; ++p) {
      const auto i = static_cast<std::size_t>(p);
      CHECK(r.frequency(p, 20) == own[i]);
      CHECK(r.linear(2).frequency(p, 20) == own[i] / 2);
      CHECK(all[i] == own[i] / 2);
    }
    const auto x = fixtures::normal(20), y = rotated(x, 1, r);
    const std::size_t j = pairs == rotary::pairing::halves ? 4 : 1;
    CHECK(y[0] == Approx(x[0] * std::cos(0.5) - x[j] * std::sin(0.5)));
    CHECK(std::equal(x.begin() + 8, x.end(), y.begin() + 8));
  }
}

TEST_CASE("a model without rotation leaves rows as they are", "[rotary]") {
  const rotary none;
  CHECK((!none.rotates() && none.rotated(64) == 0 && none == rotary()));
  CHECK_FALSE(none == rotary::halves(10'000));
  const auto x = fixtures::normal(64);
  CHECK(rotated(x, 1000, none) == x);
  kvmeld::rotation turn(none, 64);
  turn.by(1000);
  auto y = x;
  turn(y.data());
  CHECK(y == x);
}

TEST_CASE("one rotation for many rows is that of each row", "[rotary]") {
  for (const formula& x : formulas) {
    for (const bool interleaved : {false, true}) {
      for (const index_t turned : {6, 16}) {
        const index_t dim = 16;
        const auto r =
            x.of(interleaved ? rotary::interleaved(1e4) : rotary::halves(1e4)).dims(turned);
        kvmeld::rotation turn(r, dim);
        for (const double positions : {0.0, 3.0, -4000.0, 1e6}) {
          INFO(x.name << ", " << turned << " of " << dim << ", " << positions << " positions");
          turn.by(positions);
          auto y = fixtures::normal(dim);
          const auto expected = rotated(y, positions, r);
          turn(y.data());
          CHECK(oracle::difference(oracle::vec(y.begin(), y.end()),
                                   oracle::vec(expected.begin(), expected.end())) < 1e-6);
          CHECK(std::equal(y.begin() + turned, y.end(), expected.begin() + turned));
        }
      }
    }
  }
}

TEST_CASE("rotations that cannot be are refused", "[rotary][errors]") {
  using Catch::Contains;
  const rotary r = rotary::halves(10'000);
  for (const double base : {1.0, 0.0, -5.0, double{INFINITY}, std::nan("")}) {
    CHECK_THROWS_WITH(rotary::halves(base), Contains("expected a finite base above 1"));
    CHECK_THROWS_WITH(rotary::interleaved(base), Contains("expected a finite base above 1"));
  }
  for (const index_t n : {-2, 0, 1, 3}) {
    CHECK_THROWS_WITH(r.dims(n), Contains("rotary::dims: expected an even number"));
  }
  for (const double factor : {0.0, -1.0, double{INFINITY}, std::nan("")}) {
    const auto above_0 = Contains("expected a finite factor above 0");
    CHECK_THROWS_WITH(r.linear(factor), Contains("rotary::linear: ") && above_0);
    CHECK_THROWS_WITH(r.llama3({.factor = factor}), Contains("rotary::llama3: ") && above_0);
    CHECK_THROWS_WITH(r.yarn({.factor = factor}), Contains("rotary::yarn: ") && above_0);
  }
  CHECK_THROWS_WITH(r.llama3({.low = 4, .high = 4}), Contains("rotary::llama3: expected a high"));
  CHECK_THROWS_WITH(r.llama3({.original_context = 0}), Contains("rotary::llama3: expected a high"));
  CHECK_THROWS_WITH(r.yarn({.fast = 1, .slow = 1}), Contains("rotary::yarn: expected fast"));
  CHECK_THROWS_WITH(r.yarn({.slow = 0}), Contains("rotary::yarn: expected fast"));
  CHECK_THROWS_WITH(r.yarn({.original_context = 0}), Contains("rotary::yarn: expected fast"));
  const std::vector<double> own{1, 0.5}, none, bad{1, std::nan("")};
  const auto halves = rotary::pairing::halves;
  CHECK_THROWS_WITH(rotary::table(none, halves), Contains("expected at least 1 frequency"));
  CHECK_THROWS_WITH(rotary::table(bad, halves), Contains("expected finite frequencies, got nan"));
  CHECK_THROWS_WITH(rotary::table(own, halves).yarn({}), Contains("expected a base, got a table"));
  CHECK_THROWS_WITH(r.dims(8).check(6), Contains("at most 6 rotated dimensions, got 8"));
  CHECK_THROWS_WITH(rotary::table(own, halves).check(3), Contains("at most 3 rotated"));
  CHECK_THROWS_WITH(rotary::table(own, halves).dims(6).check(8), Contains("a table of 3"));
  CHECK_NOTHROW(rotary::table(own, halves).dims(4).check(8));
  CHECK_THROWS_WITH(kvmeld::rotation(r, 4098), Contains("at most 4096 dimensions, got 4098"));
}

}  // namespace rotary_formulas_test
