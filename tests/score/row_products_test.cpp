// SPDX-License-Identifier: MIT
// Rows of a tile with a vector: the same bits however many are taken together.
#include "kvmeld/score/row_products.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "support/fixtures.hpp"

namespace row_products_test {

using fixtures::index_t;

TEST_CASE("products and norms of many rows are those of each alone, to the bit", "[score]") {
  for (const index_t dim : {1, 7, 33, 128, 300}) {
    for (const index_t rows : {1, 3, 31, 33}) {
      INFO("dim " << dim << ", " << rows << " rows");
      const auto x = fixtures::normal(rows * dim), y = fixtures::normal(dim);
      const auto tile = [&](index_t first, index_t count) {
        return kvmeld::detail::tile(x.data() + first * dim, count, dim, Eigen::OuterStride<>(dim));
      };
      const auto n = static_cast<std::size_t>(rows);
      std::vector<float> dots(n), norms(n), alone(n), products(n), distances(n);
      kvmeld::score::row_dots_and_norms(tile(0, rows), y.data(), dots.data(), norms.data());
      kvmeld::score::row_norms(tile(0, rows), alone.data());
      kvmeld::score::qk_tile(y.data(), 1, tile(0, rows), products.data(), rows);
      kvmeld::score::row_distances(tile(0, rows), y.data(), distances.data());
      CHECK(norms == alone);
      CHECK(dots == products);
      for (index_t r = 0; r < rows; ++r) {
        const auto i = static_cast<std::size_t>(r);
        float dot = 0, norm = 0;
        kvmeld::score::row_dots_and_norms(tile(r, 1), y.data(), &dot, &norm);
        CHECK((dot == dots[i] && norm == norms[i]));
        double product = 0, square = 0, apart = 0;
        for (index_t d = 0; d < dim; ++d) {
          const double a = static_cast<double>(x[static_cast<std::size_t>(r * dim + d)]),
                       b = static_cast<double>(y[static_cast<std::size_t>(d)]);
          product += a * b, square += a * a, apart += (a - b) * (a - b);
        }
        CHECK(dots[i] == Approx(product).margin(1e-4));
        CHECK(norms[i] == Approx(std::sqrt(square)).margin(1e-5));
        CHECK(distances[i] == Approx(apart).margin(1e-4));
      }
    }
  }
}

}  // namespace row_products_test
