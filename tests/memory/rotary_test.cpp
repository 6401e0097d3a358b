// SPDX-License-Identifier: MIT
// Rotary embedding against the oracle, and the property it exists for.
#include <catch2/catch.hpp>

#include "support/fixtures.hpp"

namespace rotary_test {

using kvmeld::index_t;
using kvmeld::rotary;
using kvmeld::row;
using oracle::vec;

struct both {
  rotary ours;
  oracle::rope theirs;
};

/// Every pairing, base and scaling that the oracle has, for the library and for the oracle.
std::vector<both> ropes() {
  std::vector<both> all;
  for (const bool interleaved : {false, true}) {
    for (const double base : {10'000.0, 500'000.0, 100.0}) {
      const auto plain = interleaved ? rotary::interleaved(base) : rotary::halves(base);
      all.push_back({plain, {base, interleaved}});
      all.push_back({plain.llama3({}), {base, interleaved, oracle::llama3_scaling{}}});
      all.push_back({plain.llama3({32, 2, 3, 1024}),
                     {base, interleaved, oracle::llama3_scaling{32, 2, 3, 1024}}});
    }
  }
  return all;
}

vec to_vec(const std::vector<float>& x) { return {x.begin(), x.end()}; }

template <class Scalar>
std::vector<float> to_floats(const std::vector<Scalar>& x) {
  std::vector<float> y;
  for (const Scalar e : x) {
    y.push_back(static_cast<float>(e));
  }
  return y;
}

std::vector<float> rotated(std::vector<float> x, double positions, const rotary& r) {
  r.rotate(row<float>{x.data()}, static_cast<index_t>(x.size()), positions);
  return x;
}

TEST_CASE("frequencies are the oracle's, scaled as Llama 3 scales them", "[rotary]") {
  for (const both& r : ropes()) {
    for (const index_t dim : {2, 7, 64, 128}) {
      for (index_t p = 0; p < dim / 2; ++p) {
        CHECK(r.ours.frequency(p, dim) == Approx(frequency(r.theirs, p, dim)).epsilon(1e-12));
      }
    }
  }
  // Llama 3.1: the fastest as it was, the slowest an eighth.
  const rotary llama = rotary::halves(500'000).llama3({});
  CHECK(llama.frequency(0, 128) == 1);
  CHECK(llama.frequency(63, 128) == Approx(std::pow(500'000.0, -126.0 / 128) / 8));
}

TEMPLATE_TEST_CASE("rotation is the oracle's at any position", "[rotary]", float, Eigen::half,
                   Eigen::bfloat16) {
  const double tolerance = std::same_as<TestType, float>         ? 1e-6
                           : std::same_as<TestType, Eigen::half> ? 0x1.01p-11
                                                                 : 0x1.01p-8;
  for (const both& r : ropes()) {
    for (const index_t dim : {1, 2, 3, 7, 8, 64, 128}) {
      for (const double positions : {0.0, 1.0, -1.0, 17.0, -4095.0, 1e6, -1e6, 0.5}) {
        for (const index_t step : {1, 3}) {
          INFO("dim " << dim << ", " << positions << " positions, step " << step);
          auto memory = fixtures::normal<TestType>(dim * step);
          const auto before = to_floats(memory);
          r.ours.rotate(row<TestType>{memory.data(), step}, dim, positions);
          vec x, y;
          for (index_t i = 0; i < dim * step; ++i) {
            const auto k = static_cast<std::size_t>(i);
            if (i % step == 0) {
              x.push_back(static_cast<double>(before[k]));
              y.push_back(static_cast<double>(static_cast<float>(memory[k])));
            } else {
              CHECK(static_cast<float>(memory[k]) == before[k]);
            }
          }
          CHECK(oracle::difference(y, oracle::rotated(x, positions, r.theirs)) < tolerance);
          if (positions == 0) {
            CHECK(to_floats(memory) == before);  // to the bit
          }
          if (dim % 2 == 1) {
            CHECK(y.back() == x.back());
          }
        }
      }
    }
  }
}

TEST_CASE("rotations add up, and undo each other", "[rotary]") {
  for (const both& r : ropes()) {
    for (const double a : {3.0, -700.0, 1e6}) {
      for (const double b : {1.0, -1e5, -a}) {
        const auto x = fixtures::normal(64);
        const auto once = rotated(x, a + b, r.ours),
                   twice = rotated(rotated(x, a, r.ours), b, r.ours);
        CHECK(oracle::difference(to_vec(twice), to_vec(once)) < 1e-6);
      }
    }
  }
}

TEST_CASE("rotated queries and keys know their distance only", "[rotary]") {
  for (const both& r : ropes()) {
    const auto q = fixtures::normal(64), k = fixtures::normal(64);
    const auto logit = [&](double of_q, double of_k) {
      return oracle::dot(to_vec(rotated(q, of_q, r.ours)), to_vec(rotated(k, of_k, r.ours)));
    };
    for (const double distance : {0.0, 1.0, 300.0}) {
      const double here = logit(distance, 0);
      for (const double shift : {1.0, 4096.0, 1e6}) {
        CHECK(logit(distance + shift, shift) == Approx(here).margin(2e-5));
      }
    }
    const double turned = oracle::dot(to_vec(rotated(q, 300, r.ours)), to_vec(q));
    CHECK(turned < 0.99 * oracle::dot(to_vec(q), to_vec(q)));
  }
}

TEST_CASE("the two pairings are one rotation of reordered elements", "[rotary]") {
  const index_t dim = 10;
  const auto split = fixtures::normal(dim);
  const auto weave = [](const std::vector<float>& from) {
    std::vector<float> to(from.size());
    for (std::size_t p = 0; p < from.size() / 2; ++p) {
      to[2 * p] = from[p], to[2 * p + 1] = from[p + from.size() / 2];
    }
    return to;
  };
  const auto a = rotary::halves(10'000), b = rotary::interleaved(10'000);
  CHECK(weave(rotated(split, 5, a)) == rotated(weave(split), 5, b));
}

}  // namespace rotary_test
