// SPDX-License-Identifier: MIT
// fold's refinement: its gradient against differences of a loss written out in loops, and its
// promises.
#include <catch2/catch.hpp>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/merge/fit.hpp"
#include "kvmeld/peers.hpp"
#include "support/agree.hpp"

namespace refine_test {

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::fold;
using kvmeld::merge::attention_loss;
using kvmeld::merge::fitted_slots;
namespace dense = kvmeld::dense;

dense::matrix random_matrix(Eigen::Index rows, Eigen::Index columns) {
  const auto x = fixtures::normal(static_cast<index_t>(rows * columns));
  return Eigen::Map<const dense::matrix>(x.data(), rows, columns);
}

fitted_slots random_slots(Eigen::Index slots, Eigen::Index dim) {
  return {random_matrix(slots, dim), random_matrix(slots, dim), random_matrix(slots, 1).col(0)};
}

/// The loss from its definition, in double, one query and one slot at a time.
double slow_loss(const dense::matrix& queries, const dense::attention& wanted, double scale,
                 double mass_weight, const Eigen::MatrixXd& key, const Eigen::MatrixXd& value,
                 const Eigen::VectorXd& log_mass) {
  double loss = 0;
  for (Eigen::Index q = 0; q < queries.rows(); ++q) {
    double sum = 0;
    Eigen::VectorXd o = Eigen::VectorXd::Zero(value.cols());
    for (Eigen::Index r = 0; r < key.rows(); ++r) {
      double logit = log_mass[r];
      for (Eigen::Index i = 0; i < key.cols(); ++i) {
        logit += scale * double{queries(q, i)} * key(r, i);
      }
      sum += std::exp(logit);
      o += std::exp(logit) * value.row(r).transpose();
    }
    const Eigen::VectorXd want = wanted.output.row(q).transpose().cast<double>();
    const double excess = std::log(sum) - double{wanted.log_sum_exp[q]};
    loss += (o / sum - want).squaredNorm() / want.squaredNorm() + mass_weight * excess * excess;
  }
  return loss / static_cast<double>(queries.rows());
}

TEST_CASE("the refinement's loss and gradient are those of the definition", "[oracle]") {
  const auto [count, dim, slots] =
      GENERATE(std::tuple{3, 1, 1}, std::tuple{40, 7, 5}, std::tuple{300, 16, 9});
  const float scale = 0.4F, mass_weight = 0.1F;
  const dense::matrix queries = random_matrix(count, dim), keys = random_matrix(3 * slots, dim),
                      values = random_matrix(3 * slots, dim);
  const dense::vector log_ones = dense::vector::Zero(3 * slots);
  const dense::attention wanted = dense::attend(queries, keys, values, log_ones, scale);
  const fitted_slots x = random_slots(slots, dim);
  fitted_slots gradient;
  const attention_loss loss{queries, wanted, scale, mass_weight};
  const double found = loss(x, gradient);
  Eigen::MatrixXd key = x.key.cast<double>(), value = x.value.cast<double>();
  Eigen::VectorXd log_mass = x.log_mass.cast<double>();
  const auto slow = [&] {
    return slow_loss(queries, wanted, double{scale}, double{mass_weight}, key, value, log_mass);
  };
  CHECK(found == Approx(slow()).epsilon(1e-5));
  const auto by_differences = [&](double& at) {
    constexpr double step = 1e-5;
    const double here = at;
    at = here + step;
    const double above = slow();
    at = here - step;
    const double below = slow();
    at = here;
    return (above - below) / (2 * step);
  };
  for (Eigen::Index r = 0; r < slots; ++r) {
    for (Eigen::Index i = 0; i < dim; ++i) {
      CHECK(double{gradient.key(r, i)} ==
            Approx(by_differences(key(r, i))).epsilon(1e-3).margin(1e-4));
      CHECK(double{gradient.value(r, i)} ==
            Approx(by_differences(value(r, i))).epsilon(1e-3).margin(1e-4));
    }
    CHECK(double{gradient.log_mass[r]} ==
          Approx(by_differences(log_mass[r])).epsilon(1e-3).margin(1e-4));
  }
}

TEST_CASE("refine brings the loss down, keeps what is pinned, and never makes it worse",
          "[refine]") {
  const float rate = GENERATE(0.01F, 10.0F);  // the second is absurd: it keeps what it began with
  const dense::matrix queries = random_matrix(200, 8), keys = random_matrix(60, 8),
                      values = random_matrix(60, 8);
  const dense::vector log_ones = dense::vector::Zero(60);
  const dense::attention wanted = dense::attend(queries, keys, values, log_ones, 0.4F);
  fitted_slots x = random_slots(20, 8), gradient;
  const fitted_slots before = x;
  const attention_loss loss{queries, wanted, 0.4F};
  const double start = loss(x, gradient);
  std::vector<char> pinned(20, 0);
  pinned[3] = pinned[19] = 1;
  kvmeld::merge::refine(loss, pinned, 40, rate, x);
  const double end = loss(x, gradient);
  CHECK(end <= start);
  if (rate < 1) {
    CHECK(end < 0.5 * start);
  }
  for (const Eigen::Index r : {3, 19}) {
    CHECK(x.key.row(r) == before.key.row(r));
    CHECK(x.value.row(r) == before.value.row(r));
    CHECK(x.log_mass[r] == before.log_mass[r]);
  }
}

TEST_CASE("refine stays finite where squares of keys overflow floats", "[refine]") {
  // The third slot's key has to fall: to −∞, without attention, it would be better than it was.
  const dense::matrix queries = dense::matrix::Ones(5, 1);
  dense::attention wanted;
  wanted.log_sum_exp = dense::vector::Zero(5);
  wanted.output = dense::matrix::Constant(5, 1, 0.1F);
  fitted_slots x{Eigen::Vector3f(-1e25F, 0, 0), Eigen::Vector3f(0, 0, 1), dense::vector::Zero(3)};
  const char pinned[] = {1, 1, 0};
  kvmeld::merge::refine({queries, wanted}, pinned, 10, 0.01F, x);
  CHECK(x.key.allFinite());
}

TEST_CASE("refined fold is closer to the full cache on its queries", "[refine]") {
  const index_t tokens = 200, dim = 16, group = 2, slots = 48;
  const auto kv = fixtures::random_cache(tokens, dim, group);
  const fixtures::queries prompt(tokens, group, dim, 0.5F);
  const auto loss_of = [&](index_t steps) {
    auto copy = kv;
    fold policy;
    policy.prompt.refine = steps;
    const auto fitted = kvmeld::any_policy_or_peer(policy);
    auto state = fixtures::make_state(fitted, copy);
    const auto reference = evaluate::lookahead(copy, prompt.view(), {.count = tokens});
    const auto head = copy.head(0);
    const dense::matrix queries = dense::queries(reference.view().of(0), group, dim);
    const fitted_slots full{dense::keys(head), dense::values(head), dense::log_mass(head)};
    const dense::attention wanted =
        dense::attend(queries, full.key, full.value, full.log_mass, head.scale());
    fixtures::compress(fitted, copy, state, reference.view(), budget{slots});
    const fitted_slots left{dense::keys(copy.head(0)), dense::values(copy.head(0)),
                            dense::log_mass(copy.head(0))};
    fitted_slots gradient;
    return attention_loss{queries, wanted, head.scale()}(left, gradient);
  };
  CHECK(loss_of(60) < 0.8 * loss_of(0));
}

}  // namespace refine_test
