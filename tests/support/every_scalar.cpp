// SPDX-License-Identifier: MIT
// What is run with every policy over caches of each scalar, compiled once: to compile the policies
// for every scalar again in each test takes minutes.
#include <optional>

#include "support/agree.hpp"
#include "support/saved.hpp"

namespace fixtures {

template <class Scalar>
void compress(const kvmeld::any_policy_or_peer& policy, fixtures::cache<Scalar>& kv,
              fixtures::state& state, const queries& prompt, index_t target) {
  fixtures::compress(policy, kv, state, prompt.view(), kvmeld::budget{target});
}

template <class Scalar>
void agree(const kvmeld::any_policy_or_peer& policy, const any_oracle& oracle_policy,
           const setting& s, double tolerance, const std::type_identity_t<looks<Scalar>>& also) {
  INFO(policy.name() << ": " << s.tokens << " tokens of " << s.dim << " and " << s.of_values()
                     << ", group " << s.group << ", target " << s.target << ", trigger "
                     << s.trigger << ", " << s.terms.name);
  struct begun {
    fixtures::cache<Scalar> kv;
    queries prompt;
    oracle::head expected;
  };
  struct taken {
    std::vector<float> q, k, v;
    oracle::head expected;
    oracle::mat out = {};
  };
  const auto shape = s.terms.shape(1, s.group, s.dim, s.tokens + s.steps + 1, s.rope, s.value_dim);
  std::optional<begun> start;
  std::vector<taken> steps;
  const auto count = static_cast<std::size_t>(s.steps);
  for (int tries = 0; !start || steps.size() < count; ++tries) {
    REQUIRE(tries < 20);
    start = clearly([&] {
      begun b{random_cache<Scalar>(s.tokens, shape), queries(s.tokens, s.group, s.dim), {}};
      b.expected = to_oracle(b.kv.head(0));
      oracle_policy.prompt(b.expected, b.prompt.tensor(), s.target);
      return b;
    });
    steps = clear_steps(
        count, taken{{}, {}, {}, start->expected},
        [&](const taken& before) {
          const auto q = normal(s.group * s.dim);
          const auto k = normal<Scalar>(s.dim), v = normal<Scalar>(s.of_values());
          taken next{q, {k.begin(), k.end()}, {v.begin(), v.end()}, before.expected};
          next.out = oracle_policy.step(next.expected, to_mat(q.data(), s.group, s.dim),
                                        to_mat(k.data(), 1, s.dim)[0],
                                        to_mat(v.data(), 1, s.of_values())[0], s.target, s.trigger);
          return next;
        },
        s.clear);
  }
  auto& kv = start->kv;
  auto state = fixtures::make_state(policy, kv);
  const auto look = [&](const oracle::head& expected) {
    REQUIRE(oracle::set_difference(to_oracle(kv.head(0)), expected) < tolerance);
    if (also) {
      also(state[0], expected, kv.head(0));
    }
  };
  compress(policy, kv, state, start->prompt, s.target);
  look(start->expected);
  std::vector<float> out(static_cast<std::size_t>(s.group * s.of_values()));
  for (std::size_t t = 0; t < steps.size(); ++t) {
    INFO("step " << t);
    const taken& token = steps[t];
    fixtures::step(policy, kv, state, {token.q, token.k, token.v},
                   kvmeld::budget{s.target, s.trigger}, out);
    REQUIRE(oracle::difference(to_mat(out.data(), s.group, s.of_values()), token.out) < tolerance);
    look(token.expected);
  }
}

namespace {

/// A cache with a prompt behind it, and what is given to it on the way.
template <class Scalar>
struct session {
  kvmeld::any_policy_or_peer policy;
  fixtures::cache<Scalar> kv{{.heads = 2, .group = 2, .dim = 8, .capacity = 192}};
  fixtures::state state = fixtures::make_state(policy, kv);

  void prompt(std::span<const float> numbers) {
    for (index_t h = 0; h < 2; ++h) {
      const auto at = [&](index_t i) {
        return numbers.subspan(static_cast<std::size_t>(320 * i), 320);
      };
      kv.append(h, at(h), at(h + 2));
    }
    fixtures::compress(policy, kv, state, kvmeld::prompt_queries(numbers.data(), 40, 2, 2, 8),
                       kvmeld::budget{40});
  }
  std::vector<float> step(std::span<const float> numbers) {
    std::vector<float> out(32);
    fixtures::step(policy, kv, state,
                   {numbers.first(32), numbers.subspan(32, 16), numbers.subspan(48, 16)},
                   kvmeld::budget{40, 42}, out);
    return out;
  }
};

}  // namespace

template <class Scalar>
void goes_on(const kvmeld::any_policy_or_peer& policy) {
  const bool decodes = kvmeld::declared(policy).supports_decode();
  session<Scalar> one{policy}, other{policy};
  one.prompt(normal(1280)), one.prompt(normal(1280));
  for (int t = 0; t < 25 && decodes; ++t) {
    one.step(normal(64));
  }
  other.prompt(normal(1280));  // what it held is overwritten
  const std::string bytes = saved(policy, one.kv, one.state);
  std::istringstream in(bytes + "more");
  fixtures::load(in, policy, other.kv, other.state);
  CHECK(in.get() == 'm');
  REQUIRE(everything(other.kv, other.state) == everything(one.kv, one.state));
  CHECK(saved(policy, other.kv, other.state) == bytes);
  for (int t = 0; t < 25 && decodes; ++t) {
    const auto numbers = normal(64);
    REQUIRE(one.step(numbers) == other.step(numbers));
  }
  const auto numbers = normal(1280);
  one.prompt(numbers), other.prompt(numbers);
  CHECK(everything(other.kv, other.state) == everything(one.kv, one.state));
}

template void agree<float>(const kvmeld::any_policy_or_peer&, const any_oracle&, const setting&,
                           double, const looks<float>&);
template void compress(const kvmeld::any_policy_or_peer&, fixtures::cache<float>&, fixtures::state&,
                       const queries&, index_t);
template void goes_on<float>(const kvmeld::any_policy_or_peer&);

template void agree<Eigen::half>(const kvmeld::any_policy_or_peer&, const any_oracle&,
                                 const setting&, double, const looks<Eigen::half>&);
template void compress(const kvmeld::any_policy_or_peer&, fixtures::cache<Eigen::half>&,
                       fixtures::state&, const queries&, index_t);
template void goes_on<Eigen::half>(const kvmeld::any_policy_or_peer&);

template void agree<Eigen::bfloat16>(const kvmeld::any_policy_or_peer&, const any_oracle&,
                                     const setting&, double, const looks<Eigen::bfloat16>&);
template void compress(const kvmeld::any_policy_or_peer&, fixtures::cache<Eigen::bfloat16>&,
                       fixtures::state&, const queries&, index_t);
template void goes_on<Eigen::bfloat16>(const kvmeld::any_policy_or_peer&);

}  // namespace fixtures
