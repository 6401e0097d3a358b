// SPDX-License-Identifier: MIT
// The parts of fold's fit of values against double loops.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "cuda/fold_rows.hpp"

namespace kvmeld::cuda {
namespace fold_values_test {

template <class Scalar>
void check_outputs(cache_case c, std::vector<index_t> lengths, index_t count, std::uint64_t seed) {
  INFO("dim " << c.dim << ", group " << c.group << ", paged " << c.paged << ", seed " << seed);
  c.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  device_cache<Scalar> kv(c, lengths, seed);
  std::vector<index_t> plans(lengths.size(), 0);
  plans.back() = -1;
  asked_queries<Scalar> asked(c, count, plans, seed + 1);
  const auto size = static_cast<std::size_t>(c.heads * asked.all());
  device_buffer<float> lse(size), out(std::vector(size * static_cast<std::size_t>(c.dim), 7.0F));
  std::vector<double> wanted;
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = lengths[static_cast<std::size_t>(h)];
    for (index_t q = 0; q < asked.all(); ++q) {
      std::vector<double> logit, output(static_cast<std::size_t>(c.dim), 0.0);
      double sum = 0;
      for (index_t s = 0; s < n; ++s) {
        double dot = 0;
        for (index_t e = 0; e < c.dim; ++e) {
          dot += double{asked.at(h, q, e)} * double{to_float(kv.key(h, s)[e])};
        }
        logit.push_back(double{c.scale} * dot + double{kv.log_mass[kv.at(h, s)]});
        sum += std::exp(logit.back());
      }
      lse[h * asked.all() + q] = static_cast<float>(std::log(sum));
      for (index_t s = 0; s < n; ++s) {
        for (index_t e = 0; e < c.dim; ++e) {
          output[static_cast<std::size_t>(e)] +=
              std::exp(logit[static_cast<std::size_t>(s)] - std::log(sum)) *
              double{to_float(kv.value(h, s)[e])};
        }
      }
      wanted.insert(wanted.end(), output.begin(), output.end());
    }
  }
  detail::outputs_of(kv.view(), asked.rows(), lse.data(), out.data(), order(seed));
  const auto first = out.bytes();
  detail::outputs_of(kv.view(), asked.rows(), lse.data(), out.data(), order(seed + 1));
  CHECK(out.bytes() == first);
  CHECK((out.intact() && lse.intact()));
  kv.check_guards();
  double worst = 0, largest = 0;
  const std::size_t last = wanted.size() - wanted.size() / static_cast<std::size_t>(c.heads);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double x = double{out[static_cast<std::ptrdiff_t>(i)]};
    if (i >= last) {
      worst = x == 7 ? worst : 1e30;  // this head stays as it is
    } else {
      worst = std::max(worst, std::isfinite(x) ? std::abs(x - wanted[i]) : 1e30);
      largest = std::max(largest, std::abs(wanted[i]));
    }
  }
  CHECK(worst <= 1e-5 * largest);
}

/// Weights, log-mass, probabilities and what outputs lack.
template <class Scalar>
void check_rows(cache_case c, index_t count, index_t rows, std::uint64_t seed) {
  INFO("dim " << c.dim << ", group " << c.group << ", rows " << rows << ", seed " << seed);
  constexpr index_t halves = sizeof(Scalar) == 4 ? 2 : 1;
  c.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  device_cache<Scalar> kv(c, std::vector(static_cast<std::size_t>(c.heads), c.capacity), seed);
  std::vector<index_t> plans(static_cast<std::size_t>(c.heads), 0);
  plans.back() = -1;
  asked_queries<Scalar> asked(c, count, plans, seed + 1);
  const index_t all = asked.all();
  planned_rows<Scalar> plan(c, all, rows, seed + 2);
  device_buffer<float> lse(static_cast<std::size_t>(c.heads * all), 0);
  for (index_t q = 0; q < all; ++q) {  // head 0's
    double sum = 0;
    for (index_t t = 0; t < c.capacity; ++t) {
      double dot = 0;
      for (index_t e = 0; e < c.dim; ++e) {
        dot += double{asked.at(0, q, e)} * double{to_float(kv.key(0, t)[e])};
      }
      sum += std::exp(double{c.scale} * dot + double{kv.log_mass[t]});
    }
    lse[q] = static_cast<float>(std::log(sum));
  }
  // Oracle of head 0.
  std::vector<std::vector<double>> key, value;
  std::vector<double> beta;
  for (index_t r = 0; r < rows; ++r) {
    const index_t from = plan.begin[r], end = plan.begin[r + 1];
    double weight = 0, members = 0, alone = 0;
    for (index_t s = from; s < end; ++s) {
      weight += double{plan.mass[s]}, members += double{plan.sum[s]};
    }
    key.emplace_back(), value.emplace_back();
    for (index_t e = 0; e < c.dim; ++e) {
      double k = 0, v = 0;
      for (index_t s = from; s < end; ++s) {
        const double w = double{plan.mass[s]} / weight;
        k += w * double{to_float(kv.key(0, s)[e])}, v += w * double{to_float(kv.value(0, s)[e])};
      }
      key.back().push_back(k), value.back().push_back(v);
    }
    beta.push_back(double{plan.log_mass[r]});
    for (index_t q = 0; q < all; ++q) {
      double dot = 0;
      for (index_t e = 0; e < c.dim; ++e) {
        dot += double{asked.at(0, q, e)} * key.back()[static_cast<std::size_t>(e)];
      }
      alone += std::exp(double{c.scale} * dot - double{lse[q]});
    }
    beta.back() = plan.pinned(r) ? beta.back() : std::log(members / alone);
  }
  auto& work = plan.work;
  const auto run = [&](std::uint64_t order_seed) {
    const auto stream = order(order_seed);
    detail::fit_masses(kv.view(), plan.view(), plan.into.data(), asked.rows(), plan.sum.data(),
                       plan.mass.data(), lse.data(), work, stream);
    detail::outputs_of(kv.view(), asked.rows(), lse.data(), work.missing, stream);
    return detail::probabilities_of<Scalar, halves>(kv.view(), plan.view(), asked.rows(),
                                                    work.system, work, stream);
  };
  device_buffer<float> outputs(static_cast<std::size_t>(c.heads * all * c.dim));
  detail::outputs_of(kv.view(), asked.rows(), lse.data(), outputs.data(), order(seed));
  const index_t parts = run(seed);
  CHECK((plan.memory.intact() && plan.log_mass.intact() && plan.sources.intact()));
  kv.check_guards();
  double off_beta = 0, off_p = 0, off_missing = 0, squares = 0, largest = 0, size = 0;
  for (index_t r = 0; r < rows; ++r) {
    off_beta =
        worse(off_beta, std::abs(double{plan.log_mass[r]} - beta[static_cast<std::size_t>(r)]));
  }
  const half* const stored = on_host(work.system.rows);
  for (index_t q = 0; q < all; ++q) {
    std::vector<double> p;
    double sum = 0;
    for (std::size_t r = 0; r < key.size(); ++r) {
      double dot = 0;
      for (index_t e = 0; e < c.dim; ++e) {
        dot += double{asked.at(0, q, e)} * key[r][static_cast<std::size_t>(e)];
      }
      p.push_back(std::exp(double{c.scale} * dot + beta[r]));
      sum += p.back();
    }
    index_t unknown = 0;
    for (index_t r = 0; r < rows; ++r) {
      double& x = p[static_cast<std::size_t>(r)];
      x /= sum;
      if (!plan.pinned(r)) {
        const auto at = std::ptrdiff_t{unknown++} * work.system.depth + q;
        double got = double{to_float(stored[at])};
        got += halves == 2 ? double{to_float(stored[at + work.system.low()])} : 0.0;
        off_p = worse(off_p, std::abs(got / double{detail::ridge_system::p_scale} - x));
        squares += x * x;
      }
    }
    CHECK(unknown == on_host(work.unknowns)[0]);
    for (index_t e = 0; e < c.dim; ++e) {
      double x = double{outputs[q * c.dim + e]};
      size = std::max(size, std::abs(x));
      for (std::size_t r = 0; r < p.size(); ++r) {
        x -= p[r] * value[r][static_cast<std::size_t>(e)];
        size = std::max(size, std::abs(value[r][static_cast<std::size_t>(e)]));
      }
      off_missing = worse(off_missing, std::abs(double{on_host(work.missing)[q * c.dim + e]} - x));
      largest = std::max(largest, std::abs(x));
    }
  }
  CHECK(off_beta <= 2e-5);
  CHECK(off_p <= (halves == 2 ? 2e-6 : 3e-4));
  CHECK(off_missing <= 1e-5 * size);
  double held = 0, most = 0;
  for (index_t i = 0; i < parts; ++i) {
    held += double{on_host(work.squares)[i]};
    most = std::max(most, double{on_host(work.largest)[i]});
  }
  CHECK(std::abs(held - squares) <= 1e-4 * squares);
  CHECK(std::abs(most - largest) <= 1e-4 * size);
  for (index_t u = 0; u < work.system.tiles * 128; ++u) {  // zeros up to whole tiles
    for (index_t q = u < on_host(work.unknowns)[0] ? all : 0; q < work.system.depth; ++q) {
      REQUIRE(to_float(stored[std::ptrdiff_t{u} * work.system.depth + q]) == 0);
    }
  }
  CHECK(on_host(work.unknowns)[c.heads - 1] == 0);
}

TEST_CASE(
    "the rows of a plan: log-mass, probabilities and what outputs lack, whatever the scalar") {
  check_rows<half>({.heads = 2, .capacity = 90, .dim = 40, .group = 2}, 35, 50, 11);
  check_rows<bfloat16>({.heads = 2, .capacity = 130, .dim = 128, .paged = true}, 70, 70, 12);
  check_rows<half>({.heads = 2, .capacity = 20, .dim = 168}, 5, 10, 13);
  check_rows<half>({.heads = 2, .capacity = 20, .dim = 33}, 5, 10, 14);  // not aligned
  check_rows<float>({.heads = 2, .capacity = 60, .dim = 32}, 20, 33, 15);
}

TEST_CASE("reference outputs are as good as float, whatever the scalar") {
  check_outputs<half>({.heads = 2, .capacity = 70, .dim = 40, .group = 2}, {70, 9}, 40, 1);
  check_outputs<bfloat16>({.heads = 2, .capacity = 65, .dim = 128, .paged = true}, {65, 64}, 20, 2);
  check_outputs<half>({.heads = 2, .capacity = 33, .dim = 168}, {33, 5}, 5, 3);
  check_outputs<half>({.heads = 2, .capacity = 33, .dim = 33}, {33, 5}, 5, 4);  // not aligned
  check_outputs<float>({.heads = 2, .capacity = 40, .dim = 32}, {40, 5}, 20, 5);
}

}  // namespace fold_values_test
}  // namespace kvmeld::cuda
