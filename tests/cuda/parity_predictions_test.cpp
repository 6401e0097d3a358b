// SPDX-License-Identifier: MIT
// What a step predicts of the next one, and steps that go by it beside the library's.
#include <catch2/catch.hpp>
#include <set>

#include "cuda/one_step.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"

namespace kvmeld::cuda {
namespace parity_predictions_test {

const d2o joins{.recent = 0.25F, .sinks = 2};

/// Every depth of a tile, with free columns for the group and without.
constexpr std::pair<index_t, index_t> dims_and_groups[] = {{32, 4},   {64, 1},  {64, 16}, {128, 8},
                                                           {128, 16}, {256, 1}, {256, 9}};

/// The scores that a step leaves, and what it predicts of them: the first 8 that the next one would
/// evict, were all as it is.
TEST_CASE("what may be evicted next is predicted from the scores that a step leaves") {
  const cache_case c{.heads = 3, .capacity = 333, .dim = 32, .group = 4};
  const float recent = GENERATE(0.25F, 0.0F);  // 0: the step's own token too, where it has moved to
  one_step<half, d2o> x({.recent = recent, .sinks = 2}, c, {300, 40, 9}, true, 7);
  for (index_t h = 0; h < c.heads; ++h) {
    x.lower(h, 3);
  }
  x.run();
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = x.kv.length[h], next = x.kv.next_position[h];
    const protection stays{2, share_of(recent, x.limits[static_cast<std::size_t>(h)].slots - 2),
                           next};
    std::vector<std::pair<float, index_t>> order;
    for (index_t s = 0; s < n; ++s) {
      if (!stays(x.kv.position[x.kv.at(h, s)])) {
        order.emplace_back(x.kv.column(0, h, s), s);
      }
    }
    std::sort(order.begin(), order.end());
    std::vector<index_t> want(compared_rows, -1);
    for (std::size_t i = 0; i < std::min(order.size(), want.size()); ++i) {
      want[i] = order[i].second;
    }
    CHECK(x.predicted(h) == want);
  }
}

TEST_CASE("a slot that leaves is not predicted of a head over two tiles") {
  one_step<half, d2o> x(joins, {.heads = 1, .capacity = 4200, .dim = 8, .group = 1}, {4150}, true,
                        7);
  x.lower(0, 1000), x.run();
  const auto next = x.predicted(0);
  CHECK((x.evicted(0) == 1000 && std::count(next.begin(), next.end(), 1000) == 0));
  CHECK(std::set(next.begin(), next.end()).size() >= compared_rows - 1);
}

/// How many of 30 steps' predictions hold, of 8 that the step before made.
template <class Policy>
index_t predictions_that_hold(const Policy& p, index_t held) {
  one_step<half, Policy> x(p,
                           {.heads = 1, .capacity = held + 1, .dim = 32, .group = 2, .scale = 0.2F},
                           {held}, false, 5);
  emulator::chance random{6};
  index_t hold = 0;
  for (index_t t = 0; t < 30; ++t) {
    for (auto* rows : {&x.q, &x.k, &x.v}) {
      for (std::size_t i = 0; i < rows->size(); ++i) {
        rows->host()[i] = from_float<half>(0.25F * whole(random, 4));
      }
    }
    const auto predicted = x.predicted(0);
    x.run(static_cast<std::uint64_t>(t));
    hold += std::count(predicted.begin(), predicted.end(), x.evicted(0)) > 0 ? 1 : 0;
  }
  return hold;
}
TEST_CASE("predictions hold from the second step on, but for a few of keepkv's") {
  CHECK(predictions_that_hold(d2o{}, 100) == 29);
  CHECK(predictions_that_hold(keepkv{}, 100) >= 26);
  CHECK(predictions_that_hold(d2o{}, 4200) == 29);  // over two tiles
}

/// LAW: heads of a list get what they get all at once, each by its own prediction.
TEST_CASE("some heads at a time merge into the nearest as all at once do") {
  const cache_case c{.heads = 3, .capacity = 90, .dim = 64, .group = 2};
  const std::vector<index_t> held{70, 89, 33};
  one_step<half, d2o> all(joins, c, held, false, 3), some(joins, c, held, false, 3);
  for (auto* const x : {&all, &some}) {
    for (index_t h = 0; h < c.heads; ++h) {
      x->lower(h, 5 + h), x->predict(h, {h == 1 ? 20 : 5 + h});
    }
  }
  all.run();
  const auto take = [](auto& to, const auto& from, std::ptrdiff_t place, std::ptrdiff_t h,
                       std::ptrdiff_t n) {
    std::copy_n(from.host() + h * n, n, to.host() + place * n);
  };
  for (const std::vector<index_t>& heads : {std::vector<index_t>{2, 0}, {1}}) {
    device_buffer<index_t> list(heads);
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const auto place = static_cast<std::ptrdiff_t>(i);
      take(some.q, std::as_const(all.q), place, heads[i], c.group * c.dim);
      take(some.k, std::as_const(all.k), place, heads[i], c.dim);
      take(some.v, std::as_const(all.v), place, heads[i], c.dim);
    }
    some.run(some.kv.view().with_active(list.data(), static_cast<index_t>(heads.size())), 4);
  }
  for (auto* const x : {&all, &some}) {
    x->out.fill(0);
  }
  CHECK(some.bytes() == all.bytes());
  for (index_t h = 0; h < c.heads; ++h) {
    CHECK(some.predicted(h) == all.predicted(h));
  }
}

/// Decoding beside the library, which reads keys anew where its own prediction fails.
template <class Scalar>
void check_decoding(const cache_case& c, index_t target, std::uint64_t seed, index_t apart = 0) {
  const double tolerance = std::is_same_v<Scalar, Eigen::half> ? 1e-3 : 1.6e-2;
  check_steps<Scalar>(d2o{}, c, target, {target}, 10, data::integers, tolerance, seed, apart);
  check_steps<Scalar>(keepkv{.similarity = 0.3F}, c, target, {target}, 6, data::integers, tolerance,
                      seed + 1, apart);
}
TEMPLATE_TEST_CASE("steps merge into the nearest as the library's do", "", Eigen::half,
                   Eigen::bfloat16) {
  std::uint64_t seed = 1000;
  for (const auto& [dim, group] : dims_and_groups) {
    check_decoding<TestType>({.heads = 2, .capacity = 41, .dim = dim, .group = group}, 40,
                             seed += 10, group == 4 ? 7 : 0);
  }
  check_decoding<TestType>({.heads = 2, .capacity = 333, .dim = 64, .group = 2}, 332, 1400);
  check_decoding<TestType>({.heads = 2, .capacity = 41, .dim = 64, .group = 35}, 40, 1410);
  check_decoding<TestType>(
      {.heads = 2, .capacity = 41, .dim = 64, .group = 4, .paged = true, .odd = 8, .page = 5}, 40,
      1420);
}

}  // namespace parity_predictions_test
}  // namespace kvmeld::cuda
