// SPDX-License-Identifier: MIT
// Products of matrices: the bits of Eigen's operator, on the calling thread alone.
#include "kvmeld/detail/product.hpp"

#include <catch2/catch.hpp>
#include <filesystem>
#include <random>

#include "support/random.hpp"

namespace product_test {

namespace dense = kvmeld::dense;

template <class Real>
using matrix = dense::matrix_of<Real>;

template <class Real>
matrix<Real> numbers(Eigen::Index rows, Eigen::Index cols) {
  std::normal_distribution<Real> gauss;
  matrix<Real> m(rows, cols);
  for (Eigen::Index i = 0; i < m.size(); ++i) {
    m.data()[i] = gauss(streams::floats);
  }
  return m;
}

#ifdef __linux__
std::ptrdiff_t threads_of_the_process() {
  const std::filesystem::directory_iterator all("/proc/self/task");
  return std::distance(begin(all), end(all));
}
#endif

#ifdef __linux__
TEST_CASE("a product starts no thread", "[product]") {
  const auto before = threads_of_the_process();
  const auto a = numbers<float>(400, 300), b = numbers<float>(500, 300),
             c = numbers<float>(300, 500);
  matrix<float> out = matrix<float>::Zero(400, 500), square = matrix<float>::Zero(300, 300);
  dense::add_product_transposed(1, a, b, out);
  dense::add_product(1, a, c, out);
  dense::add_transposed_product(1, a, a, square);
  CHECK(threads_of_the_process() <= before);
}
#endif

TEMPLATE_TEST_CASE("products have the values of their definition", "[product]", float, double) {
  for (const auto& [m, k, n] : {std::tuple{1, 1, 1},
                                {3, 4, 5},
                                {1, 70, 33},
                                {40, 70, 1},
                                {17, 64, 130},
                                {64, 128, 300},
                                {5, 0, 7},
                                {130, 700, 90}}) {
    CAPTURE(m, k, n);
    const auto a = numbers<TestType>(m, k), b = numbers<TestType>(k, n);
    const matrix<TestType> at = a.transpose(), bt = b.transpose();
    const auto before = numbers<TestType>(m, n);
    const TestType scale = 0.25;
    matrix<double> wanted = before.template cast<double>();
    if (k > 0) {  // Eigen's own product moves a null pointer otherwise
      wanted += 0.25 * a.template cast<double>().lazyProduct(b.template cast<double>());
    }
    const double tolerance = (sizeof(TestType) == 4 ? 1e-6 : 1e-14) * (k + 10);
    matrix<TestType> ab = before, abt = before, atb = before;
    dense::add_product(scale, a, b, ab);
    dense::add_product_transposed(scale, a, bt, abt);
    dense::add_transposed_product(scale, at, b, atb);
    for (const auto* out : {&ab, &abt, &atb}) {
      CHECK((out->template cast<double>() - wanted).cwiseAbs().maxCoeff() < tolerance);
    }
#ifndef _OPENMP  // whose threads would be there before the next test
    if (k > 0) {
      matrix<TestType> of_eigen = before;
      of_eigen.noalias() += (scale * a) * b;
      CHECK(ab == of_eigen);
    }
#endif
  }
}

}  // namespace product_test
