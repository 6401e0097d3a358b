// Attention, split and combined, against double loops: every scalar, dim, group and layout, lengths
// from nothing on, and what a rule makes of the probabilities.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "cuda/device_cache.hpp"
#include "kvfold/cuda/policies/evicting_rules.cuh"
#include "kvfold/cuda/step.cuh"

namespace kvfold::cuda {
namespace {

template <class Scalar>
struct attention {
  std::vector<double> out;            // [group, dim]
  std::vector<double> probabilities;  // [group, length]
};

template <class Scalar>
attention<Scalar> slow_attention(device_cache<Scalar>& kv, index_t h, const Scalar* q) {
  const index_t n = kv.length[h], dim = kv.shape.dim, group = kv.shape.group;
  attention<Scalar> a{std::vector<double>(static_cast<std::size_t>(group * dim)),
                      std::vector<double>(static_cast<std::size_t>(group * n))};
  for (index_t g = 0; g < group; ++g) {
    double* const p = a.probabilities.data() + std::ptrdiff_t{g} * n;
    double max = -1e300, sum = 0;
    for (index_t s = 0; s < n; ++s) {
      double dot = 0;
      for (index_t i = 0; i < dim; ++i) {
        dot += double{to_float(q[g * dim + i])} * double{to_float(kv.key(h, s)[i])};
      }
      p[s] = double{kv.shape.scale} * dot + double{kv.log_mass[kv.at(h, s)]};
      max = std::max(max, p[s]);
    }
    for (index_t s = 0; s < n; ++s) {
      sum += p[s] = std::exp(p[s] - max);
    }
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
              << ", length " << lengths[0] << ", seed " << seed);
  device_cache<Scalar> kv(c, lengths, seed, {column_merge::sum, column_merge::sum}, 1);
  device_cache<Scalar> again(c, lengths, seed, {column_merge::sum, column_merge::sum}, 1);
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
  double worst = 0, worst_score = 0;
  for (index_t h = 0; h < c.heads; ++h) {
    const std::ptrdiff_t at = std::ptrdiff_t{h} * c.group * c.dim;
    const auto want = slow_attention(kv, h, q.host() + at);
    for (index_t i = 0; i < c.group * c.dim; ++i) {
      const double x = want.out[static_cast<std::size_t>(i)];
      worst = worse(worst, std::abs(double{to_float(out[at + i])} - x) / (std::abs(x) + 1));
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
  CHECK(worst_score <= 1e-5);
}

TEST_CASE("attention takes every dim, group, scalar and layout") {
  std::uint64_t seed = 1;
  const sum_rule rule{.decay = 0.5F};
  for (const index_t dim : {32, 40, 64, 128, 33, 100, 192, 256}) {
    for (const index_t group : {1, 2, 3, 4, 5, 8, 16}) {
      if (dim % 32 != 0 && group > 3) {
        continue;
      }
      const cache_case c{.heads = 2,
                         .capacity = 70,
                         .dim = dim,
                         .group = group,
                         .paged = group % 2 == 1,
                         .odd = dim % 8 == 0 ? 0 : 3,
                         .sequences = group % 4 == 0};
      in_turn(seed++, [&](auto x) {  // 7 groups: every dim and every group meets every scalar
        check_attention<decltype(x)>(rule, c, {67, group % 5}, seed);
      });
    }
  }
  for (const index_t group : {6, 7, 9, 10, 11, 12, 13, 14, 15}) {
    in_turn(seed++, [&](auto x) {
      check_attention<decltype(x)>(rule, {.capacity = 70, .dim = 32, .group = group},
                                   {67, group % 5}, seed);
    });
  }
  for (const index_t group : {1, 2, 4, 8}) {  // two loads a row
    check_attention<float>(rule, {.heads = 1, .capacity = 70, .dim = 256, .group = group}, {67},
                           seed++);
  }
}

TEST_CASE("attention takes every length, over one split and several") {
  std::uint64_t seed = 1000;
  for (index_t length = 0; length <= 33; ++length) {
    check_attention<float>(sum_rule{}, {.heads = 1, .capacity = 33, .dim = 32}, {length}, seed++);
  }
  for (const index_t length : {1, 128, 255, 256, 257, 513, 1024, 2049}) {
    check_attention<half>(sum_rule{}, {.heads = 2, .capacity = 2049, .dim = 32, .group = 2},
                          {length, 2049 - length}, seed++);
  }
}

TEST_CASE("probabilities enter the score as sum, mean or max, decayed or as a running maximum") {
  std::uint64_t seed = 2000;
  for (const auto combine : {group_combine::sum, group_combine::mean, group_combine::max}) {
    for (const bool max : {false, true}) {
      const sum_rule rule{.combine = combine, .decay = 0.75F, .max = max};
      check_attention<float>(rule, {.heads = 2, .capacity = 90, .dim = 32, .group = 4}, {90, 50},
                             seed++);
    }
  }
  check_attention<float>(no_rule{}, {.heads = 2, .capacity = 90, .dim = 32, .group = 4}, {90, 50},
                         seed++);
}

TEST_CASE("attention is the same in many orders of threads") {
  for (std::uint64_t seed = 3000; seed < 3006; ++seed) {
    check_attention<half>(sum_rule{}, {.heads = 2, .capacity = 300, .dim = 64, .group = 4},
                          {300, 130}, seed);
  }
}

TEST_CASE("attention refuses a small workspace and missing queries") {
  device_cache<float> kv({.dim = 32}, {3, 3}, 1);
  float x = 0;
  device_buffer<unsigned char> memory(workspace_bytes(kv.view()));
  const workspace w{memory.data(), memory.size()};
  CHECK_THROWS_WITH(attend(kv.view(), &x, &x, nullptr, {&x, 4}, order()),
                    Catch::Contains("bytes expected (workspace_bytes), 4 came"));
  CHECK_THROWS_WITH(attend<float>(kv.view(), nullptr, &x, nullptr, w, order()),
                    Catch::Contains("queries and out [2, 1, 32] expected, null came"));
}

}  // namespace
}  // namespace kvfold::cuda
