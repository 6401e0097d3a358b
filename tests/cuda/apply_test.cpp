// SPDX-License-Identifier: MIT
// `apply` against double loops: plans of every kind, lengths from nothing to two blocks of rows and
// one more, every scalar, strided, paged and unaligned rows, every order of threads.
#include "kvmeld/cuda/merge/apply.cuh"

#include <catch2/catch.hpp>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace apply_test {

const std::vector<slot_reduce> columns = {slot_reduce::sum, slot_reduce::max, slot_reduce::anchor};

struct device_plan {
  device_buffer<index_t> rows, begin;
  device_buffer<merge_source> sources;
  device_buffer<float> log_mass, key_delta, value_delta;

  device_plan(const cache_case& c, bool corrected)
      : rows(n(c.heads)),
        begin(n(c.heads * (c.capacity + 1))),
        sources(n(c.heads * c.capacity)),
        log_mass(n(c.heads * c.capacity)),
        key_delta(corrected ? n(c.heads * c.capacity * c.dim) : 0, 0),
        value_delta(corrected ? n(c.heads * c.capacity * c.dim) : 0, 0) {}

  static std::size_t n(index_t count) { return static_cast<std::size_t>(count); }
  plan_view view() {
    return {rows.data(),
            begin.data(),
            sources.data(),
            log_mass.data(),
            key_delta.size() == 0 ? nullptr : key_delta.data(),
            value_delta.size() == 0 ? nullptr : value_delta.data()};
  }
};

/// A plan for a head of `length` slots: some slots anchors, some merged into them, some gone; every
/// weight a power of two, so that sums are exact. `crowded`: most of them into two rows.
void random_plan(device_plan& plan, const cache_case& c, index_t h, index_t length,
                 emulator::chance& random, bool crowded) {
  std::vector<std::vector<merge_source>> rows;
  std::vector<merge_source> others;
  for (index_t s = 0; s < length; ++s) {
    if (random.below(5) < 3) {
      rows.push_back({{s}});
      if (random.below(4) == 0) {
        rows.back()[0] = {s, 0.5F, 2.0F};
      }
    } else if (random.below(2) == 0) {
      others.push_back({s, 0.25F, 0.5F});  // into any row, lower or higher
    }
  }
  const auto count = static_cast<std::uint32_t>(rows.size());
  for (const merge_source& x : others) {
    const std::uint32_t r = random.below(count + 1), some = random.below(8);
    if (count > 0) {
      rows[crowded && some < 6 ? count / (some % 2 + 2) : r % count].push_back(x);
    }
  }
  plan.rows[h] = static_cast<index_t>(rows.size());
  index_t e = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    plan.begin[std::ptrdiff_t{h} * (c.capacity + 1) + static_cast<index_t>(r)] = e;
    plan.log_mass[std::ptrdiff_t{h} * c.capacity + static_cast<index_t>(r)] =
        static_cast<float>(random.below(8));
    for (const merge_source& x : rows[r]) {
      plan.sources[std::ptrdiff_t{h} * c.capacity + e++] = x;
    }
    if (plan.key_delta.size() > 0 && random.below(2) == 0) {
      for (index_t i = 0; i < c.dim; ++i) {
        const auto at = (std::ptrdiff_t{h} * c.capacity + static_cast<index_t>(r)) * c.dim + i;
        plan.key_delta[at] = whole(random, 2);
        plan.value_delta[at] = whole(random, 2);
      }
    }
  }
  plan.begin[std::ptrdiff_t{h} * (c.capacity + 1) + plan.rows[h]] = e;
}

template <class Scalar>
void check_apply(const cache_case& c, std::vector<index_t> lengths, std::uint64_t seed,
                 bool corrected = false, bool crowded = false) {
  INFO("dim " << c.dim << ", paged " << c.paged << ", odd " << c.odd << ", length " << lengths[0]
              << ", seed " << seed);
  device_cache<Scalar> before(c, lengths, seed, columns), after(c, lengths, seed, columns),
      again(c, lengths, seed, columns), wide(c, lengths, seed, columns);
  for (auto* kv : {&before, &after, &again, &wide}) {  // numbers below 0 too
    for (index_t k = 0; k < 3; ++k) {
      for (index_t e = 0; e < c.heads * c.capacity; ++e) {
        kv->column(k, 0, e) -= 20;
      }
    }
  }
  device_plan plan(c, corrected);
  emulator::chance random{seed};
  for (index_t h = 0; h < c.heads; ++h) {
    random_plan(plan, c, h, lengths[static_cast<std::size_t>(h)], random, crowded);
  }
  if (c.heads > 1) {
    plan.rows[c.heads - 1] = -1;  // the last head stays as it is
  }
  apply(plan.view(), after.view(), after.state, order(seed));
  apply(plan.view(), again.view(), again.state, order(seed + 17));
  detail::merge_narrow(plan.view(), wide.view(), order(seed + 1));
  detail::apply_by<16>(plan.view(), wide.view(), wide.state, order(seed + 1));
  CHECK(after.keys.bytes() == again.keys.bytes());
  CHECK(after.values.bytes() == again.values.bytes());
  CHECK(after.columns.bytes() == again.columns.bytes());
  after.check_guards(), wide.check_guards();

  // Of blocks to half a code of the largest number, and what the scale's rounding adds.
  const auto same = [](float a, double b, [[maybe_unused]] double largest) {
    if constexpr (in_blocks<Scalar>) {
      return std::abs(double{a} - b) <= largest / 220;
    } else {
      return a == to_float(from_float<Scalar>(static_cast<float>(b)));
    }
  };
  bool ok = true;
  for (index_t h = 0; h < c.heads; ++h) {
    const bool stays = plan.rows[h] < 0;
    const index_t rows = stays ? lengths[static_cast<std::size_t>(h)] : plan.rows[h];
    REQUIRE((after.length[h] == rows && wide.length[h] == rows));
    for (index_t r = 0; r < rows; ++r) {
      const merge_source self{r};
      const index_t* const b = plan.begin.host() + std::ptrdiff_t{h} * (c.capacity + 1) + r;
      const merge_source* const first = stays ? &self : plan.sources.host() + before.at(h, b[0]);
      const merge_source* const last = stays ? &self + 1 : plan.sources.host() + before.at(h, b[1]);
      double keys[max_dim] = {}, values[max_dim] = {}, largest[2] = {};
      for (index_t i = 0; i < c.dim; ++i) {
        double &key = keys[i], &value = values[i];
        if (corrected && !stays) {
          key = plan.key_delta[before.at(h, r) * c.dim + i];
          value = plan.value_delta[before.at(h, r) * c.dim + i];
        }
        for (const merge_source* e = first; e != last; ++e) {
          key += double{e->key_weight} * double{number_at(before.key(h, e->source), c.dim, i)};
          value +=
              double{e->value_weight} * double{number_at(before.value(h, e->source), c.dim, i)};
        }
        if (corrected || last - first > 1 || first->key_weight != 1) {  // else it moves
          largest[0] = std::max(largest[0], std::abs(key));
          largest[1] = std::max(largest[1], std::abs(value));
        }
      }
      for (index_t i = 0; i < c.dim; ++i) {
        for (auto* const made : {&after, &wide}) {
          ok = ok && same(number_at(made->key(h, r), c.dim, i), keys[i], largest[0]) &&
               same(number_at(made->value(h, r), c.dim, i), values[i], largest[1]);
        }
      }
      float sum = 0, most = before.column(1, h, first->source);
      for (const merge_source* e = first; e != last; ++e) {
        sum += before.column(0, h, e->source);
        most = std::max(most, before.column(1, h, e->source));
      }
      ok = ok && after.column(0, h, r) == sum && after.column(1, h, r) == most &&
           after.column(2, h, r) == before.column(2, h, first->source) &&
           after.position[after.at(h, r)] == before.position[before.at(h, first->source)] &&
           after.log_mass[after.at(h, r)] ==
               (stays ? before.log_mass[before.at(h, r)] : plan.log_mass[before.at(h, r)]);
    }
  }
  CHECK(ok);
}

TEST_CASE("apply carries out plans of any length in place") {
  std::uint64_t seed = 1;
  for (const index_t length : {0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 511, 512, 513}) {
    check_apply<float>({.heads = 2, .capacity = 514, .dim = 8}, {length, length}, seed++);
  }
}

TEST_CASE("apply merges a row of very many sources, and rows whose sources lie far below") {
  for (std::uint64_t seed = 50; seed < 54; ++seed) {
    const cache_case c{.heads = 1, .capacity = 4000, .dim = 8};
    in_turn(seed, [&](auto x) { check_apply<decltype(x)>(c, {4000}, seed, seed % 2 == 0, true); });
  }
}

TEST_CASE("apply merges rows of many sources in every layout") {
  std::uint64_t seed = 60;
  for (const index_t length : {700, 1800}) {  // rows of some 50 sources; of more than 128
    for (const bool paged : {false, true}) {
      const cache_case c{.heads = 2,
                         .capacity = length + 3,
                         .dim = paged ? 33 : 40,
                         .paged = paged,
                         .odd = paged ? 3 : 0};
      in_turn(seed++, [&](auto x) {
        check_apply<decltype(x)>(c, {length, length}, seed, paged, true);
      });
    }
  }
}

TEST_CASE("apply moves every row by one slot, in chunks that wait for each other") {
  constexpr index_t n = 1500;
  for (std::uint64_t seed = 70; seed < 74; ++seed) {
    const cache_case c{.heads = 1, .capacity = n, .dim = 8};
    device_cache<half> before(c, {n}, seed), after(c, {n}, seed);
    device_plan plan(c, false);
    for (index_t r = 0; r < n; ++r) {
      plan.begin[r] = r, plan.sources[r] = {r + 1};
    }
    plan.rows[0] = n - 1;
    apply(plan.view(), after.view(), after.state, order(seed));
    bool ok = true;
    for (index_t r = 0; r + 1 < n; ++r) {
      for (index_t i = 0; i < c.dim; ++i) {
        ok = ok && to_float(after.key(0, r)[i]) == to_float(before.key(0, r + 1)[i]);
      }
    }
    CHECK(ok);
  }
}

TEST_CASE("apply takes every dim, scalar and layout") {
  std::uint64_t seed = 100;
  for (const index_t dim : {32, 40, 64, 96, 33, 128, 80, 100, 255, 256}) {
    for (const bool paged : {false, true}) {
      const cache_case c{.heads = 4,  // two sequences of two
                         .capacity = 83,
                         .dim = dim,
                         .paged = paged,
                         .odd = dim % 8 == 0 ? 0 : 3,
                         .sequences = dim % 3 == 0};
      in_turn(seed++, [&](auto x) { check_apply<decltype(x)>(c, {80, 0, 83, 71}, seed, paged); });
    }
  }
}

TEST_CASE("apply takes rows in q8_0 and fp8") {
  std::uint64_t seed = 180;
  for (const index_t dim : {32, 40, 128, 250}) {
    const cache_case c{.heads = 4,
                       .capacity = 83,
                       .dim = dim,
                       .paged = dim == 40,
                       .odd = dim == 128 ? 8 : 0,  // every row at a multiple of 16 bytes
                       .sequences = true};
    check_apply<q8_0<half>>(c, {80, 0, 83, 71}, seed++, dim > 40, dim == 128);
    check_apply<fp8_e4m3<half>>(c, {80, 0, 83, 71}, seed++, dim > 40, dim == 128);
  }
}

TEST_CASE("apply takes many heads, whole rows a block") {
  check_apply<half>({.heads = 64, .capacity = 40, .dim = 128}, std::vector<index_t>(64, 40), 190);
  check_apply<float>({.heads = 64, .capacity = 20, .dim = 72}, std::vector<index_t>(64, 20), 191);
}

TEST_CASE("apply gives the same in many orders of threads") {
  for (std::uint64_t seed = 200; seed < 212; ++seed) {
    check_apply<half>({.heads = 2, .capacity = 140, .dim = 16}, {140, 139}, seed, true);
  }
}

TEST_CASE("apply refuses views that do not fit") {
  device_cache<float> kv({.dim = 32}, {3, 3}, 1);
  CHECK_THROWS_WITH(
      apply(plan_view{}, kv.view(), kv.state, order()),
      Catch::Contains("expected the rows, begin, edges and log_mass of a plan, got null"));
  device_cache<q8_0<half>> odd({.dim = 32, .odd = 1}, {3, 3}, 1);
  CHECK_THROWS_WITH(apply(plan_view{}, odd.view(), odd.state, order()),
                    Catch::Contains("expected rows of q8_0 at multiples of 2 bytes, got others"));
  auto wide = kv.view();
  wide.dim = 257;
  CHECK_THROWS_WITH(apply(plan_view{}, wide, kv.state, order()),
                    Catch::Contains("expected a dim of 1 to 256, got 257"));
  auto deep = kv.view();
  deep.capacity = 524281;  // more blocks of 8 slots than a grid's second dimension has
  CHECK_THROWS_WITH(apply(plan_view{}, deep, kv.state, order()),
                    Catch::Contains("a capacity of 1 to 524280 slots, got 2 heads and 524281"));
}

}  // namespace apply_test
}  // namespace kvmeld::cuda
