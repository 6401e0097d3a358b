// SPDX-License-Identifier: MIT
// The fit of values alone: what it does where there is nothing to fit.
#include "kvmeld/merge/fit.hpp"

#include <catch2/catch.hpp>

namespace fit_test {

namespace dense = kvmeld::dense;
using kvmeld::merge::ridge_values;

TEST_CASE("values of no slots, on no queries, or without a ridge are not corrected", "[fit]") {
  const auto ones = [](Eigen::Index rows, Eigen::Index columns) {
    return dense::matrix(dense::matrix::Ones(rows, columns));
  };
  CHECK(ridge_values(ones(5, 0), ones(5, 3), 0.1F).size() == 0);
  CHECK(ridge_values(ones(0, 4), ones(0, 3), 0.1F) == dense::matrix::Zero(4, 3));
  CHECK(ridge_values(ones(5, 4), ones(5, 3), 0) == dense::matrix::Zero(4, 3));
}

TEST_CASE("a fit of less mass than rounding is next to none", "[fit]") {
  const auto slots = GENERATE(2, 9);  // fewer than queries, and more
  const dense::matrix missing = dense::matrix::Ones(5, 3);
  const auto largest = [&](float mass) {
    const dense::matrix p = dense::matrix::Constant(5, slots, mass / static_cast<float>(slots));
    return ridge_values(p, missing, 0.002F).cwiseAbs().maxCoeff();
  };
  CHECK(largest(1e-4F) ==
        Approx(1e4F / 1.002F).epsilon(1e-3));  // the mass as it is: λ by the trace
  CHECK(largest(1e-9F) < 1e4F);
  CHECK(largest(1e-15F) < 1e-2F);
  CHECK(largest(0) == 0);
}

}  // namespace fit_test
