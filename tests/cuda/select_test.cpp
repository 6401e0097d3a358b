// SPDX-License-Identifier: MIT
// `select` against sorting: sizes from one to 128k, ties, NaN, infinities, protected slots.
#include "kvmeld/cuda/search/select.cuh"

#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"

namespace kvmeld::cuda {
namespace select_test {

struct device_plan {
  device_buffer<index_t> rows, begin;
  device_buffer<merge_source> sources;
  device_buffer<float> log_mass;

  device_plan(index_t heads, index_t capacity)
      : rows(static_cast<std::size_t>(heads)),
        begin(static_cast<std::size_t>(heads * (capacity + 1))),
        sources(static_cast<std::size_t>(heads * capacity)),
        log_mass(static_cast<std::size_t>(heads * capacity)) {}
  plan_view view() { return {rows.data(), begin.data(), sources.data(), log_mass.data()}; }
};

/// Scores of kinds that a quick implementation trips over.
float score(emulator::chance& random, int kind) {
  const float inf = std::numeric_limits<float>::infinity();
  switch (kind) {
    case 0:  // few values, many ties
      return static_cast<float>(random.below(3));
    case 1: {  // everything
      const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                           inf,
                           -inf,
                           0.0F,
                           -0.0F,
                           1e-40F,
                           -1e-40F,
                           3.0F,
                           -3.0F};
      return odd[random.below(9)];
    }
    case 2:  // all the same
      return 0.5F;
    default:
      return static_cast<float>(random.below(1U << 24)) * 1e-6F;
  }
}

void check_select(std::vector<index_t> lengths, index_t target, int kind, std::uint64_t seed,
                  index_t sinks = 4, index_t recent = 3, bool twice = true) {
  INFO("length " << lengths[0] << ", target " << target << ", kind " << kind << ", seed " << seed);
  const index_t heads = static_cast<index_t>(lengths.size());
  const cache_case c{.heads = heads,
                     .capacity = std::max(*std::max_element(lengths.begin(), lengths.end()), 1),
                     .dim = 8};
  device_cache<float> kv(c, lengths, seed, {slot_reduce::sum});
  emulator::chance random{seed};
  for (index_t h = 0; h < heads; ++h) {
    for (index_t s = 0; s < c.capacity; ++s) {
      kv.column(0, h, s) = score(random, kind);
      kv.position[kv.at(h, s)] = (s * 7 + 1) % c.capacity;  // slots are in no order
    }
  }
  device_plan plan(heads, c.capacity), again(heads, c.capacity);
  const index_t latest = target > 0 ? recent : 0;  // a share of the target
  const sum_rule rule{
      .sinks = sinks,
      .recent = static_cast<float>(recent) / static_cast<float>(std::max(target, 1))};
  select(rule, kv.view(), kv.state, {.slots = target}, plan.view(), order(seed));
  if (twice) {
    select(rule, kv.view(), kv.state, {.slots = target}, again.view(), order(seed + 5));
    CHECK(plan.sources.bytes() == again.sources.bytes());
    CHECK(plan.begin.bytes() == again.begin.bytes());
  }
  CHECK((plan.rows.intact() && plan.begin.intact() && plan.sources.intact() &&
         plan.log_mass.intact()));
  for (index_t h = 0; h < heads; ++h) {
    const index_t n = lengths[static_cast<std::size_t>(h)];
    if (n <= target) {
      CHECK(plan.rows[h] == -1);
      continue;
    }
    index_t newest = -1;
    for (index_t s = 0; s < n; ++s) {
      newest = std::max(newest, kv.position[kv.at(h, s)]);
    }
    std::vector<index_t> stays, rest;
    for (index_t s = 0; s < n; ++s) {
      const index_t p = kv.position[kv.at(h, s)];
      (p < sinks || p > newest - latest ? stays : rest).push_back(s);
    }
    std::stable_sort(rest.begin(), rest.end(), [&](index_t a, index_t b) {
      return rank(kv.column(0, h, a)) > rank(kv.column(0, h, b));
    });
    const auto free = std::max(target - static_cast<index_t>(stays.size()), index_t{0});
    stays.insert(stays.end(), rest.begin(), rest.begin() + free);
    std::sort(stays.begin(), stays.end());
    REQUIRE(plan.rows[h] == static_cast<index_t>(stays.size()));
    bool ok = true;
    for (index_t r = 0; r < plan.rows[h]; ++r) {
      const index_t s = stays[static_cast<std::size_t>(r)];
      ok = ok && plan.sources[kv.at(h, r)] == merge_source{s} &&
           plan.begin[std::ptrdiff_t{h} * (c.capacity + 1) + r] == r &&
           plan.log_mass[kv.at(h, r)] == kv.log_mass[kv.at(h, s)];
    }
    CHECK(ok);
    CHECK(plan.begin[std::ptrdiff_t{h} * (c.capacity + 1) + plan.rows[h]] == plan.rows[h]);
  }
}

TEST_CASE("select keeps the protected, then the best, ties to the lower slot, NaN last") {
  std::uint64_t seed = 1;
  int kind =
      0;  // four of them, five targets: every length meets every kind, and every kind a target
  for (const index_t n : {1, 2, 8, 31, 32, 33, 100, 513}) {
    for (const index_t target : {0, 1, n / 3, n / 2, n - 1}) {
      check_select({n, n / 2 + 1, 0}, target, kind++ % 4, seed++);
    }
  }
  for (const index_t n : {2047, 2048, 2049, 5000}) {
    check_select({n, n / 2 + 1, 0}, n / 2, kind++ % 4, seed++);
  }
}

TEST_CASE("select takes 128k slots") {
  check_select({131072}, 13107, 3, 77, 4, 3, false);
  check_select({20001}, 9000, 0, 78);
}

TEST_CASE("select waits for the trigger, and apply carries its plan out") {
  const cache_case c{.heads = 3, .capacity = 40, .dim = 32};
  device_cache<half> kv(c, {40, 30, 20}, 5, {slot_reduce::sum});
  device_cache<half> before(c, {40, 30, 20}, 5, {slot_reduce::sum});
  device_plan plan(3, 40);
  const budget limit{.slots = 20, .trigger = 32};
  select(position_rule{{}, 4}, kv.view(), kv.state, limit, plan.view(), order());
  CHECK(plan.rows[0] == 20);
  CHECK(plan.rows[1] == -1);
  CHECK(plan.rows[2] == -1);
  apply(plan.view(), kv.view(), kv.state, order());
  CHECK(kv.length[0] == 20);
  CHECK(kv.length[1] == 30);
  for (index_t s = 0; s < 20; ++s) {  // 4 sinks and the last 16
    const index_t from = s < 4 ? s : s + 20;
    CHECK(kv.position[kv.at(0, s)] == from);
    CHECK(to_float(kv.key(0, s)[31]) == to_float(before.key(0, from)[31]));
  }
}

TEST_CASE("select gives heads with budgets of their own what one for all gives") {
  const cache_case c{.heads = 3, .capacity = 600, .dim = 8};
  device_cache<float> kv(c, {600, 590, 31}, 9, {slot_reduce::sum});
  const std::vector<budget> host{{.slots = 500}, {.slots = 9}, {.slots = 30}};
  device_buffer<budget> device(host);
  const sum_rule rule{.recent = 0.25F};
  device_plan own(3, c.capacity);
  select(rule, kv.view(), kv.state, head_budgets(host, device.data()), own.view(), order());
  for (index_t h = 0; h < c.heads; ++h) {
    device_plan one(3, c.capacity);
    select(rule, kv.view(), kv.state, host[static_cast<std::size_t>(h)], one.view(), order());
    REQUIRE(own.rows[h] == host[static_cast<std::size_t>(h)].slots);
    REQUIRE(one.rows[h] == own.rows[h]);
    bool same = true;
    for (index_t r = 0; r < own.rows[h]; ++r) {
      same = same && own.sources[kv.at(h, r)].source == one.sources[kv.at(h, r)].source;
    }
    CHECK(same);
  }
}

}  // namespace select_test
}  // namespace kvmeld::cuda
