// SPDX-License-Identifier: MIT
/// Attention by double loops, and the device's held against it.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/workspace.cuh"

namespace kvmeld::cuda {

template <class Scalar>
struct attention {
  std::vector<double> out;            // [group, dim]
  std::vector<double> probabilities;  // [group, length]
  std::vector<double> log_sum_exp;    // [group]
};

template <class Scalar>
attention<Scalar> slow_attention(device_cache<Scalar>& kv, index_t h, const Scalar* q) {
  const index_t n = kv.length[h], dim = kv.shape.dim, group = kv.shape.group;
  attention<Scalar> a{std::vector<double>(static_cast<std::size_t>(group * dim)),
                      std::vector<double>(static_cast<std::size_t>(group * n)),
                      std::vector<double>(static_cast<std::size_t>(group))};
  for (index_t g = 0; g < group; ++g) {
    double* const p = a.probabilities.data() + std::ptrdiff_t{g} * n;
    double max = -std::numeric_limits<double>::infinity(), sum;
    for (index_t s = 0; s < n; ++s) {
      double dot = 0;
      for (index_t i = 0; i < dim; ++i) {
        dot += double{to_float(q[g * dim + i])} * double{to_float(kv.key(h, s)[i])};
      }
      p[s] = kv.shape.logit(dot) + double{kv.log_mass[kv.at(h, s)]};
      max = std::max(max, p[s]);
    }
    max = kv.shape.sinks ? std::max(max, 0.0) : max;
    sum = kv.shape.sink(h, g, max);
    for (index_t s = 0; s < n; ++s) {
      sum += p[s] = std::exp(p[s] - max);
    }
    a.log_sum_exp[static_cast<std::size_t>(g)] = max + std::log(sum);
    for (index_t s = 0; s < n; ++s) {
      p[s] /= sum;
      for (index_t i = 0; i < dim; ++i) {
        a.out[static_cast<std::size_t>(g * dim + i)] += p[s] * double{to_float(kv.value(h, s)[i])};
      }
    }
  }
  return a;
}

template <class Scalar>
constexpr double tolerance = std::is_same_v<Scalar, float>  ? 1e-5
                             : std::is_same_v<Scalar, half> ? 1e-3
                                                            : 8e-3;

template <class Scalar, class Rule>
void check_attention(const Rule& rule, const cache_case& c, const std::vector<index_t>& lengths,
                     std::uint64_t seed) {
  INFO("dim " << c.dim << ", group " << c.group << ", paged " << c.paged << ", odd " << c.odd
              << ", length " << lengths[0] << ", cap " << c.soft_cap << ", sinks " << c.sinks
              << ", seed " << seed);
  device_cache<Scalar> kv(c, lengths, seed, {slot_reduce::sum, slot_reduce::sum}, 1);
  device_cache<Scalar> again(c, lengths, seed, {slot_reduce::sum, slot_reduce::sum}, 1);
  const auto before = kv.columns.bytes();
  const auto n = static_cast<std::size_t>(c.heads * c.group * c.dim);
  device_buffer<Scalar> q(n), out(n), out_again(n);
  device_buffer<float> lse(static_cast<std::size_t>(c.heads * c.group));
  emulator::chance random{seed + 1};
  for (std::size_t i = 0; i < n; ++i) {
    q.host()[i] = from_float<Scalar>(0.25F * whole(random, 3));
  }
  device_buffer<unsigned char> memory(workspace_bytes(kv.view()));
  const workspace w{memory.data(), memory.size()};
  attend_observe(rule, kv.view(), kv.state, q.data(), out.data(), lse.data(), w, order(seed));
  attend_observe(rule, again.view(), again.state, q.data(), out_again.data(), lse.data(), w,
                 order(seed + 99));
  CHECK(out.bytes() == out_again.bytes());
  CHECK(kv.columns.bytes() == again.columns.bytes());
  CHECK((memory.intact() && out.intact() && q.intact() && lse.intact()));
  kv.check_guards();
  double worst = 0, worst_score = 0, worst_lse = 0;
  for (index_t h = 0; h < c.heads; ++h) {
    const std::ptrdiff_t at = std::ptrdiff_t{h} * c.group * c.dim;
    const auto want = slow_attention(kv, h, q.host() + at);
    for (index_t i = 0; i < c.group * c.dim; ++i) {
      const double x = want.out[static_cast<std::size_t>(i)];
      worst = worse(worst, std::abs(double{to_float(out[at + i])} - x) / (std::abs(x) + 1));
    }
    for (index_t g = 0; g < c.group; ++g) {
      const double x = want.log_sum_exp[static_cast<std::size_t>(g)];
      const double y = double{lse[std::ptrdiff_t{h} * c.group + g]};
      worst_lse = worse(worst_lse, x == y ? 0 : std::abs(x - y) / (std::abs(x) + 1));
    }
    if (Rule::observes) {
      for (index_t s = 0; s < kv.length[h]; ++s) {
        double a = 0;
        for (index_t g = 0; g < c.group; ++g) {
          const double p = want.probabilities[static_cast<std::size_t>(g * kv.length[h] + s)];
          a = rule.combine == group_combine::max ? std::max(a, p) : a + p;
        }
        a /= rule.combine == group_combine::mean ? c.group : 1;
        float was = 0;
        std::memcpy(&was, before.data() + 4 * kv.at(h, s), 4);
        if constexpr (std::is_same_v<Rule, sum_rule>) {
          const double x =
              rule.max ? std::max(double{was}, a) : double{rule.decay} * double{was} + a;
          worst_score = worse(worst_score, std::abs(double{kv.column(0, h, s)} - x));
        }
      }
    }
  }
  CHECK(worst <= tolerance<Scalar>);
  CHECK(worst_lse <= 1e-6);
  CHECK(worst_score <= 1e-5);
}

}  // namespace kvmeld::cuda
