// SPDX-License-Identifier: MIT
// Latent rows: values are the first numbers of the keys, in their memory, which is written and
// merged once.
#include <catch2/catch.hpp>
#include <sstream>
#include <vector>

#include "support/clearly.hpp"
#include "support/policies.hpp"
#include "support/saved.hpp"

namespace latent_test {

using kvmeld::index_t;

constexpr index_t latent = 32, turned = 16, dim = latent + turned, group = 4;
constexpr index_t tokens = 70, steps = 20, capacity = 96, target = 40, slots = 8;

kvmeld::attention_spec spec_of(index_t value_dim = latent) {
  return {.kv_heads = 1,
          .group = group,
          .key_dim = dim,
          .value_dim = value_dim,
          .scale = 0.2F,
          .rope = kvmeld::rotary::interleaved(10'000).dims(turned).last()};
}

/// The first `latent` numbers of every row.
std::vector<float> latents(const std::vector<float>& rows) {
  std::vector<float> values;
  for (auto row = rows.begin(); row != rows.end(); row += dim) {
    values.insert(values.end(), row, row + latent);
  }
  return values;
}

template <class Scalar>
std::vector<Scalar> memory() {
  return std::vector<Scalar>(static_cast<std::size_t>(capacity * kvmeld::row_size<Scalar>(dim)));
}

/// The same rows in one memory, strided and in pages.
template <class Scalar>
struct latent_caches {
  std::vector<Scalar> rows = memory<Scalar>(), pages = memory<Scalar>();
  std::vector<index_t> table{7, 2, 5, 1, 0, 11, 3, 4, 6, 10, 9, 8};
  kvmeld::strided_cache strided{spec_of(),
                                {.capacity = capacity},
                                kvmeld::rows(rows, kvmeld::layout::nhd),
                                kvmeld::rows(rows, kvmeld::layout::nhd)};
  kvmeld::paged_cache paged{spec_of(),
                            {.capacity = capacity},
                            kvmeld::rows(pages, kvmeld::layout::pages_nhd),
                            kvmeld::rows(pages, kvmeld::layout::pages_nhd),
                            {.pages = table, .slots = slots}};
};

/// A prompt and steps under a policy; all that the head holds and puts out.
struct run {
  std::vector<float> q = fixtures::normal(tokens * group * dim), k = fixtures::normal(tokens * dim),
                     step_q = fixtures::normal(steps * group * dim),
                     step_k = fixtures::normal(steps * dim);

  std::vector<float> of(const kvmeld::any_policy_or_peer& policy, auto& kv) const {
    kvmeld::compressor meld(kv, policy, kvmeld::budget{target});
    const auto heads = kv.heads(0, 0);
    const auto values = [&](const std::vector<float>& rows) {
      return kv.one_memory() ? std::vector<float>() : latents(rows);
    };
    kv.append(heads, k, values(k), tokens);
    meld.prompt(heads, kvmeld::queries(q, tokens, kv.spec()));
    meld.end_prompt(0);
    std::vector<float> all, out(group * latent);
    for (index_t t = 0; t < steps && kvmeld::declared(policy).supports_decode(); ++t) {
      const std::vector<float> one(step_k.begin() + t * dim, step_k.begin() + (t + 1) * dim);
      const auto of_q = std::span(step_q).subspan(static_cast<std::size_t>(t * group * dim),
                                                  static_cast<std::size_t>(group * dim));
      meld.step(heads, {of_q, one, values(one)}, out);
      all.insert(all.end(), out.begin(), out.end());
    }
    const auto held = fixtures::bytes_of(kv.head(0));
    all.insert(all.end(), held.begin(), held.end());
    return all;
  }
};

TEMPLATE_TEST_CASE("LAW: one memory is, to the bit, keys with copies of their first numbers",
                   "[latent]", float, Eigen::half, Eigen::bfloat16, kvmeld::q8_0) {
  const auto all = fixtures::every_policy();
  int went = 0;
  for (const fixtures::example& e : all) {
    if (!kvmeld::declared(e.policy).supports().one_memory) {
      continue;
    }
    INFO(e.name);
    const run numbers;
    latent_caches<TestType> one;
    kvmeld::cache apart(spec_of(), {.capacity = capacity,
                                    .keys = kvmeld::storage_of<TestType>,
                                    .values = kvmeld::storage_of<TestType>});
    REQUIRE((one.strided.one_memory() && one.paged.one_memory() && !apart.one_memory()));
    const auto expected = numbers.of(e.policy, apart);
    CHECK(numbers.of(e.policy, one.strided) == expected);
    CHECK(numbers.of(e.policy, one.paged) == expected);
    CHECK(one.strided.bytes() == static_cast<std::size_t>(one.strided.head(0).length()) *
                                     (kvmeld::row_bytes(kvmeld::storage_of<TestType>, dim) + 8));
    ++went;
  }
  CHECK(went >= 15);
}

TEST_CASE("what merges latent rows by equal weights is its oracle", "[latent][oracle]") {
  const auto agrees = [](const kvmeld::any_policy_or_peer& policy, const auto& theirs) {
    INFO(policy.name());
    struct drawn {
      fixtures::queries prompt{tokens, group, dim};
      std::vector<float> k = fixtures::normal(tokens * dim);
      oracle::head expected = oracle::make_head(dim, group, double{0.2F});
    };
    const drawn x = fixtures::clearly([&] {
      drawn d;
      d.expected.value_dim = latent;
      const auto values = latents(d.k);
      for (index_t t = 0; t < tokens; ++t) {
        append(d.expected, fixtures::to_mat(d.k.data() + t * dim, 1, dim)[0],
               fixtures::to_mat(values.data() + t * latent, 1, latent)[0], t);
      }
      theirs.prompt(d.expected, d.prompt.tensor(), {}, target);
      return d;
    });
    latent_caches<float> kv;
    kv.strided.append(kv.strided.heads(0, 0), x.k, {}, tokens);
    auto state = fixtures::make_state(policy, kv.strided);
    fixtures::compress(policy, kv.strided, state, x.prompt.view(), kvmeld::budget{target});
    CHECK(oracle::set_difference(fixtures::to_oracle(kv.strided.head(0)), x.expected) < 1e-4);
  };
  agrees(kvmeld::d2o{}, oracle::d2o{});
  agrees(kvmeld::zsmerge{.sinks = 0}, oracle::zsmerge{});
  agrees(kvmeld::centroids{.window = 8}, oracle::centroids{.window = 8});
}

TEST_CASE("one memory takes no values, and merges keys and values alike", "[latent][errors]") {
  latent_caches<float> x;
  auto& kv = x.strided;
  const auto heads = kv.heads(0, 0);
  const auto k = fixtures::normal(4 * dim);
  CHECK_THROWS_WITH(kv.append(heads, k, latents(k), 4),
                    Catch::Contains("append: expected no values (they are the first 32 numbers of "
                                    "keys), got 128 numbers"));
  kv.append(heads, k, {}, 4);
  kvmeld::compressor meld(kv, kvmeld::any_policy_or_peer(kvmeld::h2o{}), kvmeld::budget{target});
  std::vector<float> out(group * latent);
  const auto q = fixtures::normal(group * dim), one = fixtures::normal(dim);
  CHECK_THROWS_WITH(meld.step(heads, {q, one, one}, out),
                    Catch::Contains("step: expected no values (they are the first 32"));
  const auto plan_of = [](float key_weight, float value_weight) {
    kvmeld::merge_plan plan;
    plan.reset(4);
    plan.add({0, 0.5F, 0.5F}), plan.add({2, key_weight, value_weight});
    plan.end_row(0);
    return plan;
  };
  const auto before = x.rows;
  CHECK_THROWS_WITH(apply(plan_of(0.5F, 0.25F), kv.head(0)),
                    Catch::Contains("expected one weight for key and value"));
  auto corrected = plan_of(0.5F, 0.5F);
  corrected.correct_values(std::vector<float>(latent), latent);
  CHECK_THROWS_WITH(apply(corrected, kv.head(0)), Catch::Contains("expected no correction"));
  CHECK(x.rows == before);
  CHECK_NOTHROW(apply(plan_of(0.5F, 0.5F), kv.head(0)));
}

TEST_CASE("policies that merge otherwise are refused when the compressor is made",
          "[latent][errors]") {
  latent_caches<float> x;
  for (const fixtures::example& e : fixtures::every_policy()) {
    INFO(e.name);
    const auto make = [&] { kvmeld::compressor meld(x.strided, e.policy, kvmeld::budget{target}); };
    if (kvmeld::declared(e.policy).supports().one_memory) {
      CHECK_NOTHROW(make());
    } else {
      CHECK_THROWS_WITH(make(), Catch::Contains(std::string(e.policy.name())) &&
                                    Catch::Contains("expected values in memory of their own"));
    }
  }
}

TEST_CASE("rows whose first numbers cannot be values are refused when the cache is made",
          "[latent][errors]") {
  auto rows = memory<float>();
  const auto make = [&](const kvmeld::attention_spec& spec) {
    kvmeld::strided_cache(spec, {.capacity = 40}, kvmeld::rows(rows, kvmeld::layout::nhd),
                          kvmeld::rows(rows, kvmeld::layout::nhd));
  };
  CHECK_NOTHROW(make(spec_of()));
  CHECK_THROWS_WITH(make(spec_of(dim + 1)),
                    Catch::Contains("expected a value_dim of at most 48 where keys and values "
                                    "have one memory") &&
                        Catch::Contains("got 49"));
  auto first = spec_of();
  first.rope = kvmeld::rotary::interleaved(10'000).dims(turned);
  CHECK_THROWS_WITH(make(first), Catch::Contains("turns none of the first 32 numbers "
                                                 "(rotary::last)"));
  first.rope = {};
  CHECK_NOTHROW(make(first));
  std::vector<kvmeld::q8_0> blocks(80);
  CHECK_THROWS_WITH(kvmeld::strided_cache(spec_of(40 - 8 + 4), {.capacity = 40},
                                          kvmeld::rows(blocks, kvmeld::layout::nhd),
                                          kvmeld::rows(blocks, kvmeld::layout::nhd)),
                    Catch::Contains("expected a value_dim of whole blocks"));
}

TEST_CASE("latent rows are saved once, and go on", "[latent][serialize]") {
  latent_caches<Eigen::half> a, b;
  const kvmeld::any_policy_or_peer policy = kvmeld::zsmerge{};
  const run numbers;
  numbers.of(policy, a.strided);
  auto state = fixtures::make_state(policy, a.strided),
       loaded = fixtures::make_state(policy, b.strided);
  state[0].extend(a.strided.head(0).length());
  const std::string bytes = fixtures::saved(policy, a.strided, state);
  std::istringstream in(bytes);
  fixtures::load(in, policy, b.strided, loaded);
  CHECK(fixtures::everything(b.strided, loaded) == fixtures::everything(a.strided, state));
  kvmeld::cache apart(
      spec_of(),
      {.capacity = capacity, .keys = kvmeld::storage::f16, .values = kvmeld::storage::f16});
  auto other = fixtures::make_state(policy, apart);
  std::istringstream again(bytes);
  CHECK_THROWS_WITH(fixtures::load(again, policy, apart, other),
                    Catch::Contains("place of values"));
  kvmeld::copy(a.strided.head(0), state[0], apart.head(0), other[0]);
  CHECK(fixtures::bytes_of(apart.head(0)) == fixtures::bytes_of(a.strided.head(0)));
  CHECK_THROWS_WITH(kvmeld::copy(apart.head(0), other[0], b.strided.head(0), loaded[0]),
                    Catch::Contains("whose values are in its keys"));
}

TEST_CASE("one memory is one, however it is said, and in every layer or in none",
          "[latent][errors]") {
  // Strides that nothing of one head is reached by differ; the rows are the same.
  auto memory_of_both = memory<float>();
  auto spec = spec_of();
  kvmeld::strided_cache said_twice(spec, {.capacity = 40},
                                   kvmeld::rows(memory_of_both, kvmeld::layout::nhd),
                                   kvmeld::rows(memory_of_both, kvmeld::strides{.row = dim}));
  CHECK(said_twice.one_memory());
  CHECK(said_twice.head(0).one_memory());
  spec.rope = spec.rope.dims(dim);
  CHECK_THROWS_WITH(kvmeld::strided_cache(
                        spec, {.capacity = 40}, kvmeld::rows(memory_of_both, kvmeld::layout::nhd),
                        kvmeld::rows(memory_of_both, kvmeld::strides{.row = dim})),
                    Catch::Contains("turns none of the first 32 numbers"));
  auto a = memory<float>(), b = memory<float>(), c = memory<float>();
  const auto apart = [](auto& x, auto& y) {
    return std::vector<kvmeld::rows>{kvmeld::rows(x, kvmeld::layout::nhd),
                                     kvmeld::rows(y, kvmeld::layout::nhd)};
  };
  CHECK_THROWS_WITH(
      kvmeld::strided_cache(spec_of(dim), {.layers = 2, .capacity = 40}, apart(a, b), apart(a, c)),
      Catch::Contains("expected values in the keys' memory in all heads or in none"));
  // Heads that have no rows yet are no one memory.
  kvmeld::slot_metadata nothing;
  const kvmeld::attention_spec filled = spec_of(dim).checked();
  CHECK_FALSE(kvmeld::head_ref(nothing, 0, filled, 0, kvmeld::storage::f32, {}, {}).one_memory());
}

}  // namespace latent_test
