// A policy beside its oracle: the same prompt, the same decode steps.
#pragma once

#include <catch2/catch.hpp>
#include <concepts>
#include <optional>

#include "support/clearly.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace fixtures {

struct setting {
  index_t tokens, dim, group, target, steps;
  index_t trigger = 0;
  double clear = 1e-4;  ///< margin of decisions in decode; more where merged rows are rounded
};

/// Prompts and decode runs of several shapes; the last ones compress now and then.
inline const setting settings[] = {
    {100, 8, 1, 40, 60}, {100, 33, 2, 41, 60}, {257, 16, 4, 64, 40},    {30, 4, 3, 48, 80},
    {1, 5, 1, 24, 100},  {60, 1, 1, 30, 0},    {100, 8, 2, 40, 60, 50}, {1, 8, 2, 24, 90, 31}};

/// What the test program compiles once, any_policy, in place of `policy`: to compile each policy
/// again for every test takes minutes. (any_policy_test.cpp holds each to be the same, to the bit.)
/// 16-bit caches have the policy itself.
template <class Scalar, class Policy>
auto compiled(const Policy& policy) {
  if constexpr (std::same_as<Scalar, float> &&
                std::constructible_from<kvfold::any_policy, Policy>) {
    return kvfold::any_policy(policy);
  } else {
    return policy;
  }
}

/// Runs both sides on the same random prompt and steps; slots, log-masses and outputs must agree.
/// `also(state, oracle head)`, or with the head as a third, is called after the prompt and after
/// every step.
template <class Scalar = float, class Policy, class Oracle, class Also>
void agree(const Policy& tested, const Oracle& oracle_policy, const setting& s, double tolerance,
           Also also) {
  static_assert(kvfold::policy<Policy>);
  const auto policy = compiled<Scalar>(tested);
  INFO(policy.name() << ": " << s.tokens << " tokens of " << s.dim << ", group " << s.group
                     << ", target " << s.target << ", trigger " << s.trigger);
  struct begun {
    kvfold::cache<Scalar> kv;
    queries prompt;
    oracle::head expected;
  };
  struct taken {
    std::vector<float> q, k, v;
    oracle::head expected;
    oracle::mat out = {};
  };
  std::optional<begun> start;
  std::vector<taken> steps;
  const auto count = static_cast<std::size_t>(s.steps);
  for (int tries = 0; !start || steps.size() < count; ++tries) {
    REQUIRE(tries < 20);
    start = clearly([&] {
      begun b{random_cache<Scalar>(s.tokens, s.dim, s.group, s.tokens + s.steps + 1),
              queries(s.tokens, s.group, s.dim),
              {}};
      b.expected = to_oracle(b.kv.head(0));
      oracle_policy.prompt(b.expected, b.prompt.tensor(), {}, s.target);
      return b;
    });
    steps = clear_steps(
        count, taken{{}, {}, {}, start->expected},
        [&](const taken& before) {
          const auto q = normal(s.group * s.dim);
          const auto k = normal<Scalar>(s.dim), v = normal<Scalar>(s.dim);
          taken next{q, {k.begin(), k.end()}, {v.begin(), v.end()}, before.expected};
          next.out = oracle_policy.step(next.expected, to_mat(q.data(), s.group, s.dim),
                                        to_mat(k.data(), 1, s.dim)[0],
                                        to_mat(v.data(), 1, s.dim)[0], s.target, s.trigger);
          return next;
        },
        s.clear);
  }
  auto& kv = start->kv;
  auto state = kvfold::make_state(policy, kv);
  const auto look = [&](const oracle::head& expected) {
    REQUIRE(oracle::set_difference(to_oracle(kv.head(0)), expected) < tolerance);
    if constexpr (requires { also(state[0], expected, kv.head(0)); }) {
      also(state[0], expected, kv.head(0));
    } else {
      also(state[0], expected);
    }
  };
  kvfold::compress(policy, kv, state, start->prompt.view(), kvfold::budget{s.target});
  look(start->expected);
  std::vector<float> out(static_cast<std::size_t>(s.group * s.dim));
  for (std::size_t t = 0; t < steps.size(); ++t) {
    INFO("step " << t);
    const taken& token = steps[t];
    kvfold::step(policy, kv, state, token.q, token.k, token.v, kvfold::budget{s.target, s.trigger},
                 out);
    REQUIRE(oracle::difference(to_mat(out.data(), s.group, s.dim), token.out) < tolerance);
    look(token.expected);
  }
}

template <class Scalar = float, class Policy, class Oracle>
void agree(const Policy& policy, const Oracle& oracle_policy, const setting& s,
           double tolerance = 1e-5) {
  agree<Scalar>(policy, oracle_policy, s, tolerance,
                [](const kvfold::head_state&, const oracle::head&) {});
}

/// LAW: what `leaving` does is what `plan` does for one slot less, to the bit: `steps` tokens into
/// a head compressed to `target`, each departed both ways.
template <class Policy>
void departs_as_planned(const Policy& policy, index_t target, index_t dim, index_t steps) {
  auto kv = random_cache(3 * target, dim, 2, 3 * target + 1);
  auto state = kvfold::make_state(policy, kv);
  const queries prompt(3 * target, 2, dim);
  kvfold::compress(policy, kv, state, prompt.view(), kvfold::budget{target});
  const auto as_set = [](const auto& head, const kvfold::head_state& columns) {
    std::vector<std::vector<float>> rows;
    for (index_t s = 0; s < head.length(); ++s) {
      std::vector<float> r{static_cast<float>(head.position(s)), head.log_mass(s)};
      for (index_t i = 0; i < head.dim(); ++i) {
        r.insert(r.end(), {head.key(s)[i], head.value(s)[i]});
      }
      for (index_t c = 0; c < columns.columns(); ++c) {
        r.push_back(columns.column(c)[static_cast<std::size_t>(s)]);
      }
      rows.push_back(r);
    }
    std::ranges::sort(rows);
    return rows;
  };
  for (index_t t = 0; t < steps; ++t) {
    INFO("step " << t);
    const auto head = kv.head(0);
    head.push(normal(dim).data(), normal(dim).data());
    std::vector<float> p(2 * static_cast<std::size_t>(head.length())), lse(2);
    const auto q = normal(2 * dim);
    auto out = q;
    kvfold::attend(head, q.data(), out.data(), p, lse);
    kvfold::observe(policy, head, state[0], state.workspace(),
                    {.probabilities = p, .log_sum_exp = lse, .query = q.data()});
    auto copy = kv;
    auto copy_state = state;
    kvfold::merge_plan plan;
    kvfold::plan(policy, copy.head(0), copy_state[0], target, plan);
    kvfold::apply(policy, plan, copy.head(0), copy_state[0]);
    kvfold::departure one;
    REQUIRE(kvfold::traits::leaving(policy, head, state[0], target, one));
    kvfold::apply(policy, one, head, state[0]);
    REQUIRE(head.length() == target);
    REQUIRE(as_set(head, state[0]) == as_set(copy.head(0), copy_state[0]));
    REQUIRE(std::ranges::equal(state[0].memory(), copy_state[0].memory()));
  }
}

}  // namespace fixtures
