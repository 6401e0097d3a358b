// SPDX-License-Identifier: MIT
// A long stream through every policy: constant memory, no allocation, sinks still there, no NaN.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <new>
#include <numeric>
#include <span>

#include "support/allocations.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"
#include "support/sanitized.hpp"

std::atomic<std::size_t> fixtures::allocations = 0;

// Every allocation of the test program is counted: new here, and malloc, which Eigen calls for its
// aligned blocks, through the linker (--wrap=malloc).
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++fixtures::allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) {
    return p;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++fixtures::allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

extern "C" {
void* __real_malloc(std::size_t bytes);  // NOLINT: the linker's names
void* __wrap_malloc(std::size_t bytes) {
  ++fixtures::allocations;
  return __real_malloc(bytes);
}
}

namespace stream_test {

using fixtures::allocations;
using fixtures::index_t;

TEST_CASE("an allocation by Eigen or by new is counted", "[stream]") {
  const std::size_t before = allocations;
  Eigen::VectorXf x(1000);
  const std::size_t after_eigen = allocations;
  const std::vector<float> y(1000);
  CHECK(after_eigen > before);
  CHECK(allocations > after_eigen);
  CHECK(x.data() != y.data());
}

// What the sanitizers look for shows in as many steps as a policy takes to come round; that nothing
// drifts is shown without them.
constexpr index_t tokens = fixtures::sanitized ? 10'000 : 100'000, sampled = tokens / 20;
constexpr index_t dim = 16, group = 2, slots = 64;

/// The tokens' numbers, drawn once: the loop itself must not allocate.
struct numbers {
  std::vector<float> pool = fixtures::normal(4096);

  std::span<const float> at(index_t t, index_t n) const {
    return std::span(pool).subspan(static_cast<std::size_t>((t * 61) % (4096 - n)),
                                   static_cast<std::size_t>(n));
  }
  std::span<const float> query(index_t t) const { return at(t, group * dim); }
  std::span<const float> key(index_t t) const { return at(t + 7, dim); }
  std::span<const float> value(index_t t) const { return at(t + 11, dim); }

  /// The full cache's attention at step `t`, [group · dim].
  std::vector<double> full(index_t t) const {
    std::vector<double> out(group * dim, 0.0);
    for (index_t g = 0; g < group; ++g) {
      double sum = 0;
      const std::span o(&out[static_cast<std::size_t>(g * dim)], dim);
      const auto q = query(t).subspan(static_cast<std::size_t>(g * dim), dim);
      for (index_t s = 0; s <= t; ++s) {
        const auto k = key(s), v = value(s);
        const double e = std::exp(std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / 4);
        sum += e;
        std::ranges::transform(o, v, o.begin(), [&](double a, float x) { return a + e * x; });
      }
      std::ranges::transform(o, o.begin(), [&](double a) { return a / sum; });
    }
    return out;
  }
};

/// `tokens` in one head: constant memory, no allocation, sinks still there, no NaN. The mean of
/// ‖o' − o‖ / ‖v‖ over the first half of the samples and over the second.
std::array<double, 2> stream(const kvmeld::any_policy_or_peer& policy, index_t trigger,
                             const numbers& from, const std::vector<std::vector<double>>& full) {
  const kvmeld::budget budget =
      trigger == 0 ? kvmeld::budget_within(policy, slots) : kvmeld::budget{slots, trigger};
  fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 72}};
  auto state = fixtures::make_state(policy, kv);
  std::vector<float> out(group * dim);
  std::size_t before = 0;
  double sum = 0;
  std::array<double, 2> error = {};
  for (index_t t = 0; t < tokens; ++t) {
    if (t == 200) {  // warm: every path has been taken
      before = allocations;
    }
    fixtures::step(policy, kv, state, {from.query(t), from.key(t), from.value(t)}, budget, out);
    sum += static_cast<double>(out[0]);
    if ((t + 1) % sampled == 0) {
      const auto& wanted = full[static_cast<std::size_t>(t / sampled)];
      double off = 0;
      for (std::size_t i = 0; i < out.size(); ++i) {
        off +=
            (static_cast<double>(out[i]) - wanted[i]) * (static_cast<double>(out[i]) - wanted[i]);
      }
      error[t < tokens / 2 ? 0 : 1] +=
          std::sqrt(off / (group * dim)) / static_cast<double>(full.size() / 2);
    }
  }
  const std::size_t made = allocations - before;
  CHECK(made == 0);
  CHECK(std::isfinite(sum));
  CHECK(kv.bytes() <= static_cast<std::size_t>(budget.trigger_length()) * (2 * dim + 2) * 4);
  const auto head = kv.head(0);
  CHECK(head.length() >= budget.slots);
  CHECK(head.length() < budget.trigger_length());
  CHECK(head.next_position() == tokens);
  index_t sinks = 0;
  for (index_t s = 0; s < head.length(); ++s) {
    sinks += head.position(s) < 4 ? 1 : 0;
    for (index_t i = 0; i < dim; ++i) {
      CHECK_FALSE(std::isnan(head.key(s)[i]));
      CHECK_FALSE(std::isnan(head.value(s)[i]));
    }
  }
  CHECK(sinks == 4);
  return error;
}

/// All of them; `trigger` 0: with the slack that the policy likes.
void stream_all(index_t trigger) {
  const numbers from;
  std::vector<std::vector<double>> full;
  for (index_t t = sampled - 1; t < tokens; t += sampled) {
    full.push_back(from.full(t));
  }
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] :
       fixtures::every_policy()) {
    INFO(name << ", trigger " << trigger);
    if (kvmeld::declared(policy).evicts() && kvmeld::declared(policy).supports_decode()) {
      const auto [early, late] = stream(policy, trigger, from, full);
      CHECK(early < 1);  // values have unit variance
      CHECK(late < 1);
    }
  }
}

TEST_CASE("a long stream runs in constant memory, and stays as close to the full cache",
          "[stream]") {
  stream_all(0);
}

TEST_CASE("a long stream with slots freed eight at a time", "[stream]") { stream_all(72); }

TEST_CASE("clearing and copying heads allocates nothing", "[stream][reuse]") {
  const numbers from;
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    fixtures::cache<float> kv{{.heads = 2, .group = group, .dim = dim, .capacity = 72}};
    auto state = fixtures::make_state(example.policy, kv);
    for (index_t t = 0; t < 50; ++t) {
      kv.head(0).push(from.key(t).data(), from.value(t).data());
    }
    state[0].extend(50);
    const std::size_t before = allocations;
    copy(kv.head(0), state[0], kv.head(1), state[1]);
    clear(kv.head(0), state[0]);
    CHECK(allocations - before == 0);
    CHECK((kv.head(0).length() == 0 && kv.head(1).length() == 50 && state[1].length() == 50));
  }
}

TEST_CASE("a step of listed heads allocates nothing", "[stream][heads]") {
  const numbers from;
  const std::vector<index_t> active = {3, 1};
  const kvmeld::any_policy_or_peer policy(kvmeld::h2o{});
  fixtures::cache<float> kv{{.heads = 4, .group = group, .dim = dim, .capacity = 72}};
  kvmeld::compressor meld(kv, policy, kvmeld::budget{slots, slots + 1});
  std::vector<float> out(2 * group * dim);
  std::size_t before = 0;
  for (index_t t = 0; t < 100; ++t) {
    before = t == 80 ? allocations.load() : before;
    meld.step(active, {from.at(t, 2 * group * dim), from.at(t, 2 * dim), from.at(t, 2 * dim)}, out);
  }
  CHECK(allocations - before == 0);
  CHECK((kv.head(3).length() == slots && kv.head(0).length() == 0));
}

TEST_CASE("a prompt's scratch is given back, and steps after it allocate nothing", "[stream]") {
  const numbers from;
  const kvmeld::any_policy_or_peer policy(kvmeld::h2o{});
  fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 1072}};
  kvmeld::compressor meld(kv, policy, kvmeld::budget{slots, slots + 8});
  const auto rows = fixtures::normal(1024 * dim), q = fixtures::normal(1024 * group * dim);
  kv.append(kv.heads(0, 0), rows, rows, 1024);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(q, 1024, kv.spec()));
  meld.end_prompt(0);
  std::vector<float> out(group * dim);
  const std::size_t before = allocations;
  for (index_t t = 0; t < 6; ++t) {
    meld.step(kv.heads(0, 0), {from.at(t, group * dim), from.at(t, dim), from.at(t, dim)}, out);
  }
  CHECK(allocations - before == 0);
}

}  // namespace stream_test
