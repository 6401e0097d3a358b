// SPDX-License-Identifier: MIT
// Cholesky factors, and triangular systems with them.
#include <catch2/catch.hpp>
#include <random>

#include "kvmeld/detail/product.hpp"
#include "support/random.hpp"

namespace solve_test {

TEMPLATE_TEST_CASE("symmetric systems are factored and solved", "[product]", float, double) {
  using matrix = kvmeld::dense::matrix_of<TestType>;
  std::normal_distribution<TestType> gauss;
  const auto draw = [&] { return gauss(streams::floats); };
  const double tolerance = sizeof(TestType) == 4 ? 2e-5 : 1e-13;
  for (const auto& [n, columns] :
       {std::pair{1, 1}, {5, 3}, {32, 40}, {33, 257}, {80, 600}, {128, 1000}}) {
    CAPTURE(n, columns);
    const matrix any = matrix::NullaryExpr(n + 3, n, draw);
    matrix upper = matrix::Identity(n, n) * static_cast<TestType>(n);
    kvmeld::dense::add_gram(any, upper);
    const Eigen::MatrixXd x = any.template cast<double>();
    const Eigen::MatrixXd wanted = x.transpose() * x + n * Eigen::MatrixXd::Identity(n, n);
    kvmeld::dense::cholesky(upper);
    const Eigen::MatrixXd u = upper.template cast<double>().template triangularView<Eigen::Upper>();
    CHECK((u.transpose() * u - wanted).cwiseAbs().maxCoeff() < tolerance * n);
    const matrix right = matrix::NullaryExpr(n, columns, draw);
    matrix half = right;
    kvmeld::dense::solve_lower(upper, half);
    const Eigen::MatrixXd back = u.transpose() * half.template cast<double>();
    CHECK((back - right.template cast<double>()).cwiseAbs().maxCoeff() < tolerance);
    matrix whole = half;
    kvmeld::dense::solve_lower<true>(upper, whole);
    const Eigen::MatrixXd again = wanted * whole.template cast<double>();
    CHECK((again - right.template cast<double>()).cwiseAbs().maxCoeff() < tolerance);
  }
}

TEST_CASE("a matrix that is not positive definite is factored up to where it is", "[product]") {
  kvmeld::dense::matrix_of<float> m(2, 2);
  m << 4, 2, 2, -1;
  kvmeld::dense::cholesky(m);
  CHECK((m(0, 0) == 2 && m(0, 1) == 1 && m(1, 1) == -2));
}

}  // namespace solve_test
