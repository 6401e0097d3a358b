// SPDX-License-Identifier: MIT
// Steps that merge the evicted slot into its nearest: which it is, by loops; and a prediction
// decides when the nearest is found, not which it is.
#include <catch2/catch.hpp>

#include "cuda/one_step.hpp"
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

/// LAW: right, wrong, of another time or none: a prediction changes no byte but the next one's.
/// `change(x, h, a)` makes a hard case of a head whose slot `a` is to be evicted.
template <class Scalar, class Policy, class Change>
void check_predictions(const Policy& p, const cache_case& c, const std::vector<index_t>& held,
                       bool whole_rows, std::uint64_t seed, Change change) {
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group << ", seed " << seed);
  const auto prepare = [&](auto& x) {
    for (index_t h = 0; h < c.heads; ++h) {
      const index_t n = x.lengths[static_cast<std::size_t>(h)];
      const index_t a = 2 + static_cast<index_t>((seed * 7 + static_cast<std::uint64_t>(h) * 5) %
                                                 static_cast<std::uint64_t>(n / 2));
      x.lower(h, a), change(x, h, a);
    }
  };
  using step_type = one_step<Scalar, Policy>;
  step_type before(p, c, held, whole_rows, seed), alone(p, c, held, whole_rows, seed);
  prepare(before), prepare(alone);
  alone.kv.state.predicted = nullptr;
  alone.run(seed);
  std::vector<index_t> evicted;
  for (index_t h = 0; h < c.heads; ++h) {
    INFO("head " << h);
    evicted.push_back(alone.evicted(h));
    if (whole_rows) {
      CHECK(joined(before, alone, h, evicted.back()) ==
            nearest_by_loops(before, h, evicted.back()));
    }
  }
  for (std::size_t kind = 0; kind < 5; ++kind) {
    INFO("prediction " << kind);
    step_type x(p, c, held, whole_rows, seed);
    prepare(x);
    for (index_t h = 0; h < c.heads; ++h) {
      const index_t a = evicted[static_cast<std::size_t>(h)], b = a == 0 ? 1 : a - 1;
      const std::vector<index_t> kinds[] = {{a},
                                            {b, 0, b + 2, a, 3},
                                            {b, b, 1 << 20, -7, held[0] + 1, 2, b, a},
                                            {b, b + 2},
                                            h % 2 == 0 ? std::vector{a} : std::vector{b}};
      x.predict(h, kinds[kind]);
    }
    x.run(seed + 1 + kind);
    CHECK(x.bytes() == alone.bytes());
  }
}

/// Every depth of a tile, with free columns for the group and without.
constexpr std::pair<index_t, index_t> dims_and_groups[] = {{32, 4},   {64, 1},  {64, 16}, {128, 8},
                                                           {128, 16}, {256, 1}, {256, 9}};

template <class Scalar>
void check_both(const cache_case& c, const std::vector<index_t>& held, std::uint64_t seed) {
  const auto as_it_is = [](auto&, index_t, index_t) {};
  for (const bool whole_rows : {true, false}) {
    check_predictions<Scalar>(joins, c, held, whole_rows, seed, as_it_is);
    check_predictions<Scalar>(votes, c, held, whole_rows, seed + 10, as_it_is);
  }
}

TEMPLATE_TEST_CASE("a prediction decides when the nearest is found, not which it is", "", half,
                   bfloat16) {
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

TEST_CASE("predictions of a head over two tiles") {
  check_both<half>({.heads = 1, .capacity = 4200, .dim = 8, .group = 1}, {4150}, 900);
}

/// Plain products, where tensor cores cannot take the rows: predictions are not looked at.
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
    check_predictions<TestType>(joins, c, {70, 149}, true, seed, change);
    check_predictions<TestType>(votes, c, {70, 149}, true, seed + 1, change);
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
  check_predictions<TestType>(joins, c, {70, 149}, true, 11, evicts_nan);
  check_predictions<TestType>(votes, c, {70, 149}, false, 12, evicts_nan);  // it weighs nothing
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
  check_predictions<TestType>(d2o{.recent = 0, .sinks = 2}, c, {70, 89}, true, 41,
                              [](auto& x, index_t h, index_t a) { x.kv.column(0, h, a) = 2; });
}

}  // namespace parity_nearest_test
}  // namespace kvmeld::cuda
