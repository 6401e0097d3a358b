// SPDX-License-Identifier: MIT
// Triangular systems, and what is made of them.
#include <Eigen/Cholesky>
#include <catch2/catch.hpp>
#include <random>

#include "kvmeld/detail/product.hpp"
#include "support/random.hpp"

namespace solve_test {

TEST_CASE("a lower triangle is solved", "[product]") {
  using matrix = kvmeld::dense::matrix_of<float>;
  std::normal_distribution<float> gauss;
  const auto draw = [&] { return gauss(streams::floats); };
  for (const auto& [n, columns] :
       {std::pair{1, 1}, {5, 3}, {32, 40}, {33, 257}, {80, 600}, {128, 1000}}) {
    CAPTURE(n, columns);
    const matrix any = matrix::NullaryExpr(n, n, draw);
    Eigen::MatrixXf lower = any * any.transpose() + matrix::Identity(n, n) * static_cast<float>(n);
    const Eigen::LLT<Eigen::Ref<Eigen::MatrixXf>> factor(lower);
    const matrix right = matrix::NullaryExpr(n, columns, draw);
    matrix x = right;
    const Eigen::Map<const matrix> upper(lower.data(), n, n);
    kvmeld::dense::solve_lower(upper, x);
    const Eigen::MatrixXd l = lower.cast<double>().triangularView<Eigen::Lower>();
    const Eigen::MatrixXd back = l * x.cast<double>();
    CHECK((back - right.cast<double>()).cwiseAbs().maxCoeff() < 2e-5);
  }
}

}  // namespace solve_test
