// SPDX-License-Identifier: MIT
// Steps that merge the evicted slot into its nearest: which it is, by loops, and by the library.
#include <catch2/catch.hpp>

#include "cuda/one_step.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"

namespace kvmeld::cuda {
namespace parity_nearest_test {

/// Joins whatever is nearest, and a moderate budget's heads are unprotected but for the latest.
const d2o joins{.recent = 0.25F, .sinks = 2};
const keepkv votes{.sinks = 2, .recent = 0.25F, .similarity = -1};

/// The slot nearest to `a` by loops: ties to the lower slot, what is no number like no other.
template <class Scalar, class Policy>
index_t nearest_by_loops(one_step<Scalar, Policy>& x, index_t h, index_t a) {
  const index_t n = x.lengths[static_cast<std::size_t>(h)];
  const auto row = [&](index_t s) {
    return s < n ? x.kv.key(h, s) : x.k.host() + std::ptrdiff_t{h} * x.shape.dim;
  };
  const auto dot = [&](index_t s, index_t t) {
    float sum = 0;
    for (index_t i = 0; i < x.shape.dim; ++i) {
      sum += to_float(row(s)[i]) * to_float(row(t)[i]);
    }
    return sum;
  };
  index_t best = -1;
  float most = 0;
  for (index_t s = 0; s <= n; ++s) {
    const float lengths = std::sqrt(dot(a, a)) * std::sqrt(dot(s, s));
    const float ratio = lengths > 0 ? dot(a, s) / lengths : 0.0F;
    const float cosine = ratio == ratio ? ratio : 0.0F;
    if (s != a && (best < 0 || cosine > most)) {
      best = s, most = cosine;
    }
  }
  return best;
}

/// Which slot another went into; the step's own token is the last of them.
template <class Scalar, class Policy>
index_t joined(one_step<Scalar, Policy>& before, one_step<Scalar, Policy>& after, index_t h,
               index_t evicted) {
  const index_t n = before.lengths[static_cast<std::size_t>(h)];
  const auto bytes = sizeof(Scalar) * static_cast<std::size_t>(before.shape.dim);
  const auto changed = [&](const Scalar* value, float log_mass, index_t now) {
    return log_mass != after.kv.log_mass[after.kv.at(h, now)] ||
           std::memcmp(value, after.kv.value(h, now), bytes) != 0;
  };
  for (index_t s = 0; s < n; ++s) {
    if (s != evicted && changed(before.kv.value(h, s), before.kv.log_mass[before.kv.at(h, s)], s)) {
      return s;
    }
  }
  const Scalar* const fresh = before.v.host() + std::ptrdiff_t{h} * before.shape.dim;
  return evicted < n && changed(fresh, 0, evicted) ? n : -1;
}

/// `change(x, h, a)` makes a hard case of a head whose slot `a` is to be evicted.
template <class Scalar, class Policy, class Change>
void check_nearest(const Policy& p, const cache_case& c, const std::vector<index_t>& held,
                   std::uint64_t seed, Change change) {
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group << ", seed " << seed);
  const auto prepare = [&](auto& x) {
    for (index_t h = 0; h < c.heads; ++h) {
      const index_t n = x.lengths[static_cast<std::size_t>(h)];
      const index_t a = 2 + static_cast<index_t>((seed * 7 + static_cast<std::uint64_t>(h) * 5) %
                                                 static_cast<std::uint64_t>(n / 2));
      x.lower(h, a), change(x, h, a);
    }
  };
  one_step<Scalar, Policy> before(p, c, held, true, seed), after(p, c, held, true, seed);
  prepare(before), prepare(after);
  after.run(seed);
  for (index_t h = 0; h < c.heads; ++h) {
    INFO("head " << h);
    const index_t evicted = after.evicted(h);
    CHECK(joined(before, after, h, evicted) == nearest_by_loops(before, h, evicted));
  }
}

/// Every depth of a tile, with free columns for the group and without.
constexpr std::pair<index_t, index_t> dims_and_groups[] = {{32, 4},   {64, 1},  {64, 16}, {128, 8},
                                                           {128, 16}, {256, 1}, {256, 9}};

template <class Scalar>
void check_both(const cache_case& c, const std::vector<index_t>& held, std::uint64_t seed) {
  const auto as_it_is = [](auto&, index_t, index_t) {};
  check_nearest<Scalar>(joins, c, held, seed, as_it_is);
  check_nearest<Scalar>(votes, c, held, seed + 10, as_it_is);
}

TEMPLATE_TEST_CASE("an evicted slot goes into the nearest of all others", "", half, bfloat16) {
  std::uint64_t seed = 100;
  for (const auto& [dim, group] : dims_and_groups) {
    check_both<TestType>({.heads = 2, .capacity = 90, .dim = dim, .group = group}, {70, 89},
                         seed += 20);
  }
  check_both<TestType>({.heads = 3, .capacity = 333, .dim = 40, .group = 5}, {300, 65, 332}, 700);
  check_both<TestType>(
      {.heads = 4, .capacity = 200, .dim = 64, .group = 2, .odd = 8, .sequences = true},
      {40, 130, 16, 199}, 720);
  for (const index_t page : {5, 16, 24}) {
    check_both<TestType>(
        {.heads = 2, .capacity = 150, .dim = 48, .group = 4, .paged = true, .page = page},
        {120, 149}, 740 + static_cast<std::uint64_t>(page));
  }
}

TEST_CASE("the nearest in a head over two tiles") {
  check_both<half>({.heads = 1, .capacity = 4200, .dim = 8, .group = 1}, {4150}, 900);
}

/// Plain products, where tensor cores cannot take the rows.
TEST_CASE("the nearest of rows that tensor cores cannot take") {
  check_both<float>({.heads = 2, .capacity = 90, .dim = 32, .group = 4}, {70, 89}, 940);
  check_both<half>({.heads = 2, .capacity = 90, .dim = 31, .group = 4}, {70, 89}, 960);
}

TEMPLATE_TEST_CASE("keepkv estimates a slot that some query heads cannot see", "", bfloat16,
                   float) {
  // Logits of the first four query heads are -inf, more than a thread has at once; the fifth's is
  // 0.
  one_step<TestType, keepkv> x({.similarity = 1},
                               {.heads = 1, .capacity = 41, .dim = 8, .group = 5}, {40}, false, 1);
  std::fill_n(x.q.host(), x.q.size(), from_float<TestType>(0.0F));
  std::fill_n(x.kv.key(0, 0), 8, from_float<TestType>(0.0F));
  for (std::size_t g = 0; g < 4; ++g) {
    x.q.host()[g * 8] = from_float<TestType>(-1e30F);
  }
  x.kv.key(0, 0)[0] = from_float<TestType>(1e30F);
  x.kv.column(keepkv_rule::weight_sum, 0, 0) = 0;  // nothing was estimated before
  x.run();
  CHECK(x.kv.column(keepkv_rule::log_score, 0, 0) == Approx(-std::log(5.0F)));
}

TEMPLATE_TEST_CASE("the nearest where keys are alike, zero, or no numbers", "", half, bfloat16,
                   float) {
  const cache_case c{.heads = 2, .capacity = 150, .dim = 32, .group = 4};
  const auto check = [&](std::uint64_t seed, auto change) {
    check_nearest<TestType>(joins, c, {70, 149}, seed, change);
    check_nearest<TestType>(votes, c, {70, 149}, seed + 1, change);
  };
  const auto set = [](TestType* row, float scale) {
    for (index_t i = 0; i < 32; ++i) {
      row[i] = from_float<TestType>(scale * static_cast<float>(i % 5 - 2));
    }
  };
  const auto each_other = [](auto& x, index_t h, index_t a, auto use) {
    for (index_t s = 0; s < x.lengths[static_cast<std::size_t>(h)]; ++s) {
      if (s != a) {
        use(s, x.kv.key(h, s));
      }
    }
  };
  check(1, [&](auto& x, index_t h, index_t a) {  // ties, some of another length
    set(x.kv.key(h, a), 1);
    each_other(x, h, a, [&](index_t s, TestType* key) {
      if (s % 7 == 3) {
        set(key, s % 2 == 0 ? 2 : 0.5F);
      }
    });
  });
  check(3, [&](auto& x, index_t h, index_t a) {  // the step's own token, and nothing else like it
    set(x.kv.key(h, a), 1), set(x.k.host() + std::ptrdiff_t{h} * 32, 3);
    each_other(x, h, a, [&](index_t, TestType* key) { set(key, -1); });
  });
  check(5, [&](auto& x, index_t h, index_t a) {  // the step's own token ties with an earlier slot
    set(x.kv.key(h, a), 1), set(x.k.host() + std::ptrdiff_t{h} * 32, 1);
    set(x.kv.key(h, a + 20), 1);
  });
  check(7, [&](auto& x, index_t h, index_t a) { set(x.kv.key(h, a), 0); });  // like none
  check(9, [&](auto& x, index_t h, index_t a) {
    each_other(x, h, a, [&](index_t s, TestType* key) { set(key, s < 40 ? -1 : 0); });
    set(x.kv.key(h, a), 1);
  });
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto evicts_nan = [&](auto& x, index_t h, index_t a) {
    x.kv.key(h, a)[3] = from_float<TestType>(nan);
  };
  check_nearest<TestType>(joins, c, {70, 149}, 11, evicts_nan);
  check(13, [&](auto& x, index_t h, index_t) { x.kv.key(h, 0)[3] = from_float<TestType>(nan); });
  const float inf = std::numeric_limits<float>::infinity();
  check(17, [&](auto& x, index_t h, index_t a) {     // the products of these two are no number
    set(x.kv.key(h, a), 1), set(x.kv.key(h, 8), 2);  // a lane has slots 0 and 8
    x.kv.key(h, 0)[3] = from_float<TestType>(inf);
    x.kv.key(h, 8)[3] = x.kv.key(h, a)[3] = from_float<TestType>(0);
  });
  check(15, [&](auto& x, index_t h, index_t) {
    x.k[h * 32 + 5] = from_float<TestType>(nan);  // the new token's
  });
}

/// Nothing but the sinks is protected: the step's own token is evicted.
TEMPLATE_TEST_CASE("the step's own token goes into its nearest", "", half, bfloat16) {
  const cache_case c{.heads = 2, .capacity = 90, .dim = 64, .group = 1};
  check_nearest<TestType>(d2o{.recent = 0, .sinks = 2}, c, {70, 89}, 41,
                          [](auto& x, index_t h, index_t a) { x.kv.column(0, h, a) = 2; });
}

/// LAW: heads of a list get what they get all at once.
TEST_CASE("some heads at a time merge into the nearest as all at once do") {
  const cache_case c{.heads = 3, .capacity = 90, .dim = 64, .group = 2};
  const std::vector<index_t> held{70, 89, 33};
  one_step<half, d2o> all(joins, c, held, false, 3), some(joins, c, held, false, 3);
  for (auto* const x : {&all, &some}) {
    for (index_t h = 0; h < c.heads; ++h) {
      x->lower(h, 5 + h);
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
}

/// Decoding beside the library.
template <class Scalar>
void check_decoding(const cache_case& c, index_t target, std::uint64_t seed, index_t apart = 0) {
  const double tolerance = std::is_same_v<Scalar, Eigen::half> ? 1e-3 : 1.6e-2;
  check_steps<Scalar>(d2o{}, c, target, {target}, 6, data::integers, tolerance, seed, apart);
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

TEMPLATE_TEST_CASE("several slots merge now and then as the library's do", "", Eigen::half,
                   Eigen::bfloat16) {
  const cache_case c{.heads = 3, .capacity = 41, .dim = 64, .group = 4};
  const double tolerance = std::is_same_v<TestType, Eigen::half> ? 1e-3 : 1.6e-2;
  check_steps<TestType>(d2o{}, c, 36, {32, 39}, 16, data::integers, tolerance, 1500, 2);
  check_steps<TestType>(keepkv{.similarity = 0.3F}, c, 36, {32, 39}, 16, data::random, tolerance,
                        1501, 2);
}

}  // namespace parity_nearest_test
}  // namespace kvmeld::cuda
