// SPDX-License-Identifier: MIT
// Thousands of merges in a storage of less precision than float: rows and log-mass stay near those
// that float has.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"
#include "support/sanitized.hpp"

namespace storage_drift_test {

using fixtures::index_t;
using fixtures::normal;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

constexpr index_t dim = 32, slots = 48, tokens = 2400;

/// A head of one storage, and the policy's state for it.
template <class Storage>
struct held {
  fixtures::cache<Storage> kv{{.heads = 1, .dim = dim, .capacity = slots + 1}};
  fixtures::state state;

  explicit held(const any_policy& p) : state(fixtures::make_state(p, kv)) {}
};

/// What the storages are off by, relative to the largest number of a row, and in log-mass.
struct off {
  double row = 0, log_mass = 0;
};

/// The same decisions in float and in `Storage`: the float head attends and decides; the other
/// takes the same tokens, the same attention and the same changes. The first eighth of the tokens
/// is about `first`, all others about -`first`.
template <class Storage>
off drift(const any_policy& p, float first) {
  streams::restart();
  held<float> decides(p);
  held<Storage> follows(p);
  kvmeld::workspace& work = decides.state.workspace();
  const budget b = kvmeld::budget_within(p, slots);
  const auto head = decides.kv.head(0);
  const auto other = follows.kv.head(0);
  std::vector<float> out(dim);
  off most;
  for (index_t t = 0; t < tokens; ++t) {
    auto k = normal(dim, 0.3F), v = normal(dim, 0.3F);
    const auto q = normal(dim);
    for (auto* x : {&k, &v}) {
      // As the storage holds it: so both begin alike.
      std::ranges::for_each(*x, [&](float& e) { e += t < tokens / 8 ? first : -first; });
      Storage stored[kvmeld::row_size<Storage>(dim)];
      const bool rotated = x == &v && other.rotates_values();
      rotated ? kvmeld::detail::hadamard(x->data(), dim) : void();
      kvmeld::detail::store_row(x->data(), kvmeld::row<Storage>{stored}, dim);
      kvmeld::to_floats(kvmeld::row<Storage>{stored}, dim, x->data());
      rotated ? kvmeld::detail::hadamard(x->data(), dim) : void();
    }
    head.push(k.data(), v.data()), other.push(k.data(), v.data());
    decides.state[0].extend(head.length()), follows.state[0].extend(head.length());
    const auto length = static_cast<std::size_t>(head.length());
    const auto probabilities = std::span(work.attention).first(length);
    const auto log_sum_exp = std::span(work.log_sum_exp).first(1);
    kvmeld::declared(p).attend(head, decides.state[0], q.data(), out.data(), probabilities,
                               log_sum_exp);
    const kvmeld::observation seen{
        .probabilities = probabilities, .log_sum_exp = log_sum_exp, .query = q.data()};
    kvmeld::observe(p, head, decides.state[0], work, seen);
    kvmeld::observe(p, other, follows.state[0], work, seen);
    if (b.reached(head.length())) {
      plan(p, head, decides.state[0], b.slots, work.scratch, work.plan);
      apply(p, work.plan, head, decides.state[0], work.scratch);
      if (other.rotates_values() && !work.plan.value_corrections().empty()) {
        const auto of_plan = work.plan.value_corrections();
        std::vector<float> corrections(of_plan.begin(), of_plan.end());
        for (std::size_t r = 0; r < corrections.size(); r += dim) {
          kvmeld::detail::hadamard(corrections.data() + r, dim);
        }
        work.plan.correct_values(corrections, dim);
        work.plan.set_for_rotated_values(true);
      }
      apply(p, work.plan, other, follows.state[0], work.scratch);
    }
    if (head.length() <= b.slots) {
      kvmeld::declared(p).after_compress(head, decides.state[0], b.slots);
      kvmeld::declared(p).after_compress(other, follows.state[0], b.slots);
    }
  }
  REQUIRE(other.length() == head.length());
  for (index_t s = 0; s < head.length(); ++s) {
    REQUIRE(other.position(s) == head.position(s));
    most.log_mass = std::max(most.log_mass, double{std::abs(head.log_mass(s) - other.log_mass(s))});
    for (const bool key : {false, true}) {
      float x[dim], y[dim];
      kvmeld::to_floats(key ? head.key(s) : head.value(s), dim, x);
      kvmeld::to_floats(key ? other.key(s) : other.value(s), dim, y);
      if (!key && other.rotates_values()) {
        kvmeld::detail::hadamard(x, dim);  // compared as they are held
      }
      const float size = std::abs(
          *std::ranges::max_element(x, [](float a, float c) { return std::abs(a) < std::abs(c); }));
      for (index_t i = 0; i < dim; ++i) {
        most.row = std::max(most.row, double{std::abs(x[i] - y[i]) / size});
      }
    }
  }
  return most;
}

TEST_CASE("merges in every storage stay near those in float", "[half][q8_0]") {
  // In units of the storage's rounding, half of its last place. Most policies round each merge, and
  // what a slot held before weighs less and less, or the weights are of few tokens. Those named
  // here have slots that take in token after token: their roundings add up.
  // In 4 bits fewer of them add up; its bounds are 1.5 times what was seen.
  struct bounds {
    double most = 3, in_4_bits = 2.2;
  };
  const std::map<std::string, bounds> roundings = {{"ems", {16, 4.5}},
                                                   {"keepkv", {32, 4.6}},
                                                   {"keepkv code", {48, 4.2}},
                                                   {"fold", {32, 11.5}},
                                                   {"fold by scores", {40, 40}},
                                                   {"centroids", {64, 11}},
                                                   {"fold that scores in decode", {40, 40}},
                                                   {"cam", {200, 8.6}},
                                                   {"d2o that counts", {48, 9}},
                                                   {"ems un-rotated", {32, 21}},
                                                   {"massfold", {24, 10.2}}};
  for (const auto& example : fixtures::every_policy()) {
    if (!kvmeld::declared(example.policy).supports_decode() ||
        !kvmeld::declared(example.policy).evicts()) {
      continue;
    }
    const auto named = roundings.find(example.name);
    const bounds bound = named == roundings.end() ? bounds{} : named->second;
    constexpr float firsts[] = {1, 0};
    for (const float first : std::span(firsts).first(fixtures::sanitized ? 1 : 2)) {
      const auto check = [&](const off& of, double unit, double most) {
        CAPTURE(example.name, first, unit);
        CHECK(of.row <= most * unit);
        CHECK(of.log_mass == 0);
      };
      check(drift<Eigen::half>(example.policy, first), 0x1p-11, bound.most);
      check(drift<Eigen::bfloat16>(example.policy, first), 0x1p-8, bound.most);
      check(drift<kvmeld::q8_0>(example.policy, first), 1.0 / 254, bound.most);
      // At the end without a code.
      check(drift<kvmeld::q4_0>(example.policy, first), 1.0 / 8, bound.in_4_bits);
    }
  }
}

TEST_CASE("a running mean goes where its tokens go, in every storage", "[half][q8_0]") {
  // The first hundredth of the tokens is about 1, all others about -1.
  // Half of the tokens come to a head in `Before`, which is copied for the others.
  const auto mean = []<class Before, class Storage>(Before, Storage) {
    streams::restart();
    constexpr index_t many = 20'000;
    held<Before> before{kvmeld::zsmerge{}};
    held<Storage> one{kvmeld::zsmerge{}};
    std::vector<float> out(dim);
    for (index_t t = 0; t < many; ++t) {
      auto k = normal(dim, 0.3F), v = normal(dim, 0.3F);
      for (auto* x : {&k, &v}) {
        std::ranges::for_each(*x, [&](float& e) { e += t < many / 100 ? 1.0F : -1.0F; });
      }
      const auto step = [&](auto& to) {
        fixtures::step(any_policy(kvmeld::zsmerge{}), to.kv, to.state, {normal(dim), k, v},
                       budget{slots}, out);
      };
      if (t == many / 2) {
        kvmeld::copy(before.kv.head(0), before.state[0], one.kv.head(0), one.state[0]);
      }
      t < many / 2 ? step(before) : step(one);
    }
    const auto head = one.kv.head(0);
    index_t residual = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      residual = head.log_mass(s) > head.log_mass(residual) ? s : residual;
    }
    float value[dim];
    kvmeld::value_to_floats(head, residual, value);
    return std::accumulate(value, value + dim, 0.0F) / dim;
  };
  const float right = mean(float(), float());
  CHECK(right == Approx(-0.98).margin(0.01));
  const auto check = [&](auto storage, double margin) {
    CHECK(mean(storage, storage) == Approx(right).margin(margin));
    CHECK(mean(float(), storage) == Approx(right).margin(margin));
    CHECK(mean(Eigen::half(), storage) == Approx(right).margin(margin));
    CHECK(mean(kvmeld::q4_0(), storage) == Approx(right).margin(5e-3));
  };
  check(float(), 1e-3), check(kvmeld::q8_0(), 5e-3);
  if (!fixtures::sanitized) {
    check(Eigen::half(), 1e-3), check(Eigen::bfloat16(), 5e-3), check(kvmeld::q4_0(), 5e-3);
  }
}

}  // namespace storage_drift_test
