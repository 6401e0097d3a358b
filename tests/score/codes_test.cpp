// SPDX-License-Identifier: MIT
// Attention over rows in blocks: queries in 16 bits, products with codes in integers.
#include "support/codes.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "oracle/blocks.hpp"

namespace codes_test {

using kvmeld::index_t;
using kvmeld::score::rounded_queries;

/// What a query is rounded to.
std::vector<float> rounded(const std::vector<float>& q) {
  rounded_queries x;
  x.assign(q.data(), 1, static_cast<index_t>(q.size()));
  std::vector<float> y;
  for (std::size_t i = 0; i < q.size(); ++i) {
    y.push_back(static_cast<float>(x.codes(0, 0)[i]) * x.scale(0));
  }
  return y;
}

TEST_CASE("a query is off by the 32,767th part of its largest number at most", "[codes]") {
  for (const float size : {1e-44F, 1e-38F, 1e-30F, 1e-20F, 1.0F, 1e4F, 1e30F, 3e38F}) {
    for (const index_t dim : {1, 5, 32, 33, 200}) {
      std::vector<float> q(kvmeld::as_size(dim));
      for (std::size_t i = 0; i < q.size(); ++i) {
        q[i] = size * std::cos(static_cast<float>(i * i));
      }
      const auto y = rounded(q);
      for (std::size_t i = 0; i < q.size(); ++i) {
        CAPTURE(size, dim, i);
        CHECK(std::abs(y[i] - q[i]) <= std::max(size, 0x1p-100F) / 32767);  // one unit below 2⁻¹⁰⁰
      }
    }
  }
  CHECK(rounded({0, -0.0F, 0}) == std::vector<float>{0, 0, 0});
  for (const float unit : {0x1p-110F, 1.0F, 0x1p100F}) {
    for (const float largest : {1.0F, 16383.0F, 16384.0F, 32767.0F}) {
      const std::vector<float> whole{largest * unit, -unit, 0, 3 * unit, -largest * unit};
      CAPTURE(unit, largest);
      CHECK(rounded(whole) == whole);
    }
  }
  CHECK(rounded({32767.25F, -1, 3}) == std::vector<float>{32767, -1, 3});
  CHECK(rounded({32767.5F, -1.5F, 3}) == std::vector<float>{32768, -2, 4});  // by twos
  CHECK(rounded({-32768, 2, 8}) == std::vector<float>{-32768, 2, 8});
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    for (const float x : rounded({1, bad, 2})) {
      CHECK(std::isnan(x));
    }
  }
  rounded_queries several;
  const std::vector<float> q{1, 2, -3, std::nanf("")};
  several.assign(q.data(), 2, 2);
  CHECK((several.codes(0, 0)[1] == 16384 && several.codes(0, 0)[2] == 0));
  CHECK((several.blocks() == 1 && several.queries() == 2 && std::isnan(several.scale(1))));
}

TEST_CASE("as many queries go together as fit", "[codes]") {
  CHECK((rounded_queries::most(1) == 16 && rounded_queries::most(128) == 16));
  CHECK((rounded_queries::most(257) == 14 && rounded_queries::most(512) == 8));
  CHECK((rounded_queries::most(4095) == 1 && rounded_queries::most(4096) == 1));
}

TEMPLATE_TEST_CASE("products and sums of codes are the oracle's, and vectors' those of one by one",
                   "[codes]", kvmeld::q8_0, kvmeld::q6_0, kvmeld::q4_0) {
  constexpr int bits = std::same_as<TestType, kvmeld::q8_0>   ? 8
                       : std::same_as<TestType, kvmeld::q6_0> ? 6
                                                              : 4;
  for (const index_t dim : {1, 5, 31, 32, 33, 64, 80, 96, 128, 200, 257}) {
    for (const index_t queries : {1, 2, 3, 4, 6, 7, 8, 11}) {
      for (const index_t count : {1, 2, 3, 7, 8, 9, 15, 127, 128}) {
        CAPTURE(dim, queries, count);
        codes_scene<TestType> scene(dim, queries, count);
        CHECK(scene.as_one_by_one());
        const auto dots = scene.dots(), sums = scene.sums();
        std::vector<float> q;  // the test above is of these
        for (auto x = scene.q.begin(); x != scene.q.end(); x += dim) {
          const auto y = rounded({x, x + dim});
          q.insert(q.end(), y.begin(), y.end());
        }
        const auto keys = scene.rows(true), values = scene.rows(false);
        for (index_t g = 0; g < queries; ++g) {
          std::vector<double> out(kvmeld::as_size(dim), 1.0), size = out;
          for (index_t s = 0; s < count; ++s) {
            const auto bytes = [](const TestType* row) {
              return reinterpret_cast<const std::byte*>(row);
            };
            const auto k = oracle::blocks(bytes(keys[s]), bits, dim),
                       v = oracle::blocks(bytes(values[s]), bits, dim);
            const index_t at = g * kvmeld::score::tile_slots + s;
            double dot = 0, most = 0;
            for (index_t i = 0; i < dim; ++i) {
              const auto e = kvmeld::as_size(i);
              const double product = k[e] * static_cast<double>(q[kvmeld::as_size(g * dim + i)]);
              const double part = v[e] * static_cast<double>(scene.p[kvmeld::as_size(at)]);
              dot += product, most += std::abs(product);
              out[e] += part, size[e] += std::abs(part);
            }
            const double off = std::abs(static_cast<double>(dots[kvmeld::as_size(at)]) - dot);
            REQUIRE(off <= 2e-6 * most + 1e-30);  // float's rounding
          }
          for (index_t i = 0; i < dim; ++i) {
            const auto e = kvmeld::as_size(i);
            const double off = static_cast<double>(sums[kvmeld::as_size(g * dim + i)]) - out[e];
            REQUIRE(std::abs(off) <= 2e-6 * size[e]);
          }
        }
      }
    }
  }
}

TEST_CASE("the largest codes do not overflow, and an engine's -128 counts", "[codes]") {
  codes_scene<kvmeld::q8_0> scene(128, 1, 9);
  kvmeld::q8_0 block;
  block.scale = Eigen::half(2.0F);
  std::fill_n(block.codes, 32, std::int8_t{-128});
  for (index_t s = 0; s < 9; ++s) {
    for (const bool keys : {true, false}) {
      std::fill_n(const_cast<kvmeld::q8_0*>(scene.rows(keys)[s]), 4, block);
    }
  }
  std::fill(scene.q.begin(), scene.q.end(), -1e4F);
  std::fill(scene.p.begin(), scene.p.end(), 0.5F);
  CHECK(scene.dots()[8] == Approx(128.0 * 1e4 * 256).epsilon(1e-6));
  CHECK(scene.sums()[127] == 1 - 9 * 128);
  CHECK(scene.as_one_by_one());
}

TEMPLATE_TEST_CASE("a block without a number makes its product and its sums NaN alone", "[codes]",
                   kvmeld::q8_0, kvmeld::q6_0, kvmeld::q4_0) {
  codes_scene<TestType> scene(64, 2, 12);
  for (const bool keys : {true, false}) {
    const_cast<TestType&>(scene.rows(keys)[10][1]).scale =
        std::numeric_limits<Eigen::half>::quiet_NaN();
  }
  const auto dots = scene.dots(), sums = scene.sums();
  for (index_t s = 0; s < 12; ++s) {
    CHECK(std::isnan(dots[kvmeld::as_size(s)]) == (s == 10));
  }
  for (index_t i = 0; i < 64; ++i) {
    CHECK(std::isnan(sums[kvmeld::as_size(i)]) == (i >= 32));
  }
}

}  // namespace codes_test
