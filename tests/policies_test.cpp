// The laws of every policy, from one list, and each policy against its oracle.
#include "support/policies.hpp"

#include <catch2/catch.hpp>
#include <limits>
#include <tuple>

#include "support/fixtures.hpp"

using fixtures::index_t;
using kvfold::budget;

namespace {

/// A head with `tokens` random tokens that has been observed with all its prompt's queries.
template <class Policy, class Scalar = float>
struct observed {
  kvfold::cache<Scalar> kv;
  fixtures::queries queries;
  kvfold::state state;

  observed(const Policy& policy, index_t tokens, index_t dim = 16, index_t group = 2,
           float scale = 1)
      : kv(fixtures::random_cache<Scalar>(tokens, dim, group, tokens + 8)),
        queries(tokens, group, dim, scale),
        state(kvfold::make_state(policy, kv)) {
    kvfold::observe(policy, kv.head(0), state[0], queries.view());
  }
};

void same_plan(const kvfold::merge_plan& a, const kvfold::merge_plan& b) {
  REQUIRE(a.rows() == b.rows());
  for (index_t r = 0; r < a.rows(); ++r) {
    CHECK(std::ranges::equal(a.row(r), b.row(r)));
    CHECK(a.log_mass(r) == b.log_mass(r));
  }
}

/// The slots of a head as a set, in position order.
template <class Head>
std::vector<std::vector<float>> as_set(const Head& head) {
  std::vector<std::vector<float>> rows;
  for (index_t s = 0; s < head.length(); ++s) {
    std::vector<float> r{static_cast<float>(head.position(s)), head.log_mass(s)};
    for (index_t i = 0; i < head.dim(); ++i) {
      r.push_back(static_cast<float>(head.key(s)[i]));
      r.push_back(static_cast<float>(head.value(s)[i]));
    }
    rows.push_back(r);
  }
  std::ranges::sort(rows);
  return rows;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("a plan obeys its laws and is pure", "[laws]", fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  const index_t tokens = GENERATE(30, 64, 129);
  observed<TestType> o(policy, tokens);
  for (index_t target = kvfold::traits::least(policy); target <= tokens + 2; target += 5) {
    INFO(policy.name() << ", " << tokens << " tokens, target " << target);
    const auto before = fixtures::bytes_of(o.kv.head(0));
    kvfold::merge_plan plan, again;
    kvfold::plan(policy, o.kv.head(0), o.state[0], target, plan);
    kvfold::plan(policy, o.kv.head(0), o.state[0], target, again);
    CHECK_NOTHROW(kvfold::check(plan));
    same_plan(plan, again);
    CHECK(fixtures::bytes_of(o.kv.head(0)) == before);
    CHECK(plan.rows() == (kvfold::traits::bounded(policy) ? std::min(target, tokens) : tokens));
    if (target >= tokens) {
      same_plan(plan, kvfold::identity(o.kv.head(0)));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("sinks and the latest tokens survive with their bytes", "[laws]",
                        fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  observed<TestType> o(policy, 100);
  const auto head = o.kv.head(0);
  const auto all = as_set(head);
  kvfold::compress(policy, head, o.state[0], o.state.workspace(), {40});
  const auto kept = as_set(head);
  const auto survives = [&](index_t position) {
    return std::ranges::find(kept, all[static_cast<std::size_t>(position)]) != kept.end();
  };
  for (index_t position = 0; position < fixtures::sinks_of(policy); ++position) {
    CHECK(survives(position));
  }
  for (index_t position = 96; position < 100; ++position) {
    CHECK(survives(position));
  }
}

TEMPLATE_LIST_TEST_CASE("a departure is the plan for one slot less", "[laws]", fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  observed<TestType> o(policy, 90);
  const index_t target = 40;
  kvfold::compress(policy, o.kv.head(0), o.state[0], o.state.workspace(), {target});
  for (int round = 0; round < 30 && kvfold::traits::bounded(policy); ++round) {
    const auto head = o.kv.head(0);
    head.push(fixtures::normal(16).data(), fixtures::normal(16).data());
    std::vector<float> p(2 * static_cast<std::size_t>(head.length()));
    std::vector<float> out(32), log_sum_exp(2);
    const auto q = fixtures::normal(32);
    kvfold::traits::attend(policy, head, o.state[0], q.data(), out.data(), p, log_sum_exp);
    kvfold::observe(policy, head, o.state[0], o.state.workspace(),
                    {.probabilities = p, .log_sum_exp = log_sum_exp, .query = q.data()});

    auto copy = o.kv;
    auto copy_state = o.state;
    kvfold::merge_plan plan;
    kvfold::plan(policy, copy.head(0), copy_state[0], target, plan);
    kvfold::check(plan);
    kvfold::apply(policy, plan, copy.head(0), copy_state[0]);
    kvfold::departure one;
    if (kvfold::traits::leaving(policy, head, o.state[0], target, one)) {
      kvfold::apply(policy, one, head, o.state[0]);
    } else {
      kvfold::apply(policy, plan, head, o.state[0]);
    }
    CHECK(as_set(head) == as_set(copy.head(0)));
    for (index_t c = 0; c < o.state[0].columns(); ++c) {
      const auto x = o.state[0].column(c), y = copy_state[0].column(c);
      std::vector<float> a(x.begin(), x.end()), b(y.begin(), y.end());
      std::ranges::sort(a), std::ranges::sort(b);
      CHECK(a == b);
    }
    kvfold::traits::settle(policy, head, o.state[0], target);
  }
}

TEMPLATE_LIST_TEST_CASE("values enter linearly: scaling V scales the compressed V", "[laws]",
                        fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  observed<TestType> o(policy, 80);
  auto doubled = o.kv;
  for (index_t s = 0; s < 80; ++s) {
    for (index_t i = 0; i < 16; ++i) {
      doubled.head(0).value(s)[i] *= 2;
    }
  }
  auto state = o.state;
  kvfold::compress(policy, o.kv.head(0), o.state[0], o.state.workspace(), {40});
  kvfold::compress(policy, doubled.head(0), state[0], state.workspace(), {40});
  for (index_t s = 0; s < o.kv.head(0).length(); ++s) {
    for (index_t i = 0; i < 16; ++i) {
      CHECK(doubled.head(0).value(s)[i] == 2 * o.kv.head(0).value(s)[i]);
      CHECK(doubled.head(0).key(s)[i] == o.kv.head(0).key(s)[i]);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("any_policy is the policy inside it", "[laws]", fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  const kvfold::any_policy any(policy);
  auto a = fixtures::random_cache(70, 8, 2, 80, 3);
  auto b = a;
  auto state_a = kvfold::make_state(policy, a);
  auto state_b = kvfold::make_state(any, b);
  const auto q = fixtures::normal(70 * 3 * 2 * 8);
  const auto view = kvfold::prompt_queries(q.data(), 70, 3, 2, 8);
  kvfold::compress(policy, a, state_a, view, budget{30});
  kvfold::compress(any, b, state_b, view, budget{30});
  std::vector<float> out_a(3 * 2 * 8), out_b(out_a);
  for (int t = 0; t < 9; ++t) {
    const auto x = fixtures::normal(48), k = fixtures::normal(24), v = fixtures::normal(24);
    kvfold::step(policy, a, state_a, x, k, v, budget{30}, out_a);
    kvfold::step(any, b, state_b, x, k, v, budget{30}, out_b);
    CHECK(out_a == out_b);
  }
  for (index_t h = 0; h < 3; ++h) {
    CHECK(fixtures::bytes_of(a.head(h)) == fixtures::bytes_of(b.head(h)));
  }
}

TEST_CASE("each head may run its own policy and budget", "[laws]") {
  const std::vector<kvfold::any_policy> policies = {kvfold::full_cache{}, kvfold::streaming_llm{},
                                                    kvfold::h2o{}, kvfold::snapkv{.window = 8},
                                                    kvfold::zsmerge{.residual = 2}};
  const std::vector<budget> budgets = {{1}, {20}, {30}, {40, 44}, {50}};
  auto kv = fixtures::random_cache(60, 8, 2, 100, 5);
  auto state = kvfold::make_state(std::span(policies), kv);
  const auto q = fixtures::normal(60 * 5 * 2 * 8);
  kvfold::compress(std::span(policies), kv, state, kvfold::prompt_queries(q.data(), 60, 5, 2, 8),
                   std::span(budgets));
  std::vector<float> out(80);
  for (index_t t = 1; t <= 10; ++t) {
    kvfold::step(std::span(policies), kv, state, fixtures::normal(80), fixtures::normal(40),
                 fixtures::normal(40), std::span(budgets), out);
    CHECK(kv.head(0).length() == 60 + t);
    CHECK(kv.head(1).length() == 20);
    CHECK(kv.head(2).length() == 30);
    CHECK(kv.head(3).length() == 40 + t % 4);
    CHECK(kv.head(4).length() == 50);
  }
}

// ------------------------------------------------------------------------------ hard inputs

TEMPLATE_LIST_TEST_CASE("ties, zeros, duplicates and huge logits leave exactly the budget",
                        "[hard]", fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  const float scale = GENERATE(0.0F, 1.0F, 1e4F);
  const bool duplicates = GENERATE(false, true);
  const index_t dim = GENERATE(1, 7, 16), group = GENERATE(1, 3);
  auto kv = fixtures::random_cache(80, dim, group, 90);
  if (duplicates) {
    for (index_t s = 1; s < 80; ++s) {
      for (index_t i = 0; i < dim; ++i) {
        kv.head(0).key(s)[i] = kv.head(0).key(0)[i] * scale;
      }
    }
  }
  auto state = kvfold::make_state(policy, kv);
  const fixtures::queries queries(80, group, dim, scale);
  kvfold::compress(policy, kv, state, queries.view(), budget{32});
  std::vector<float> out(static_cast<std::size_t>(group * dim));
  const index_t expected = kvfold::traits::bounded(policy) ? 32 : 80;
  for (index_t t = 0; t < 5; ++t) {
    kvfold::step(policy, kv, state, fixtures::normal(group * dim, scale), fixtures::normal(dim),
                 fixtures::normal(dim), budget{32}, out);
    CHECK(kv.head(0).length() == (kvfold::traits::bounded(policy) ? expected : 81 + t));
    for (const float x : out) {
      CHECK(std::isfinite(x));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a NaN score ranks last and changes no law", "[hard]", fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  observed<TestType> o(policy, 60);
  if (o.state[0].columns() == 0 || !fixtures::ranks_by_column<TestType>()) {
    SUCCEED("no scores");
    return;
  }
  for (const index_t s : {10, 20, 21}) {
    o.state[0].column(0)[static_cast<std::size_t>(s)] = std::numeric_limits<float>::quiet_NaN();
  }
  kvfold::merge_plan plan;
  kvfold::plan(policy, o.kv.head(0), o.state[0], 40, plan);
  CHECK_NOTHROW(kvfold::check(plan));
  CHECK(plan.rows() == 40);
  for (index_t r = 0; r < plan.rows(); ++r) {
    const bool alone = plan.row(r).size() == 1 && plan.log_mass(r) == 0.0F;
    CHECK_FALSE((alone && (plan.anchor(r) == 10 || plan.anchor(r) == 20 || plan.anchor(r) == 21)));
  }
}

TEMPLATE_LIST_TEST_CASE("one token, and a prompt that fits, stay as they are", "[hard]",
                        fixtures::policies) {
  const TestType policy = fixtures::example<TestType>();
  const index_t tokens = GENERATE(1, 2, 40);
  auto kv = fixtures::random_cache(tokens, 5, 1, 64);
  const auto before = fixtures::bytes_of(kv.head(0));
  auto state = kvfold::make_state(policy, kv);
  kvfold::compress(policy, kv, state, fixtures::queries(tokens, 1, 5).view(), budget{40});
  CHECK(fixtures::bytes_of(kv.head(0)) == before);
}
