// SPDX-License-Identifier: MIT
// Every policy decodes on a thread with as little stack as musl gives it: 128 KiB.
#include <catch2/catch.hpp>

#ifdef __linux__
#include <pthread.h>

#include <functional>
#include <string>

#include "support/fixtures.hpp"
#include "support/policies.hpp"
#include "support/sanitized.hpp"

namespace stack_test {

using fixtures::normal;
using kvmeld::budget;
using kvmeld::index_t;

constexpr std::size_t stack_bytes = 128 << 10;

#ifdef __OPTIMIZE__
constexpr bool frames_are_real = !fixtures::sanitized;  // the sanitizer's are larger
#else
constexpr bool frames_are_real = false;
#endif

void on_small_stack(const std::function<void()>& f) {
  pthread_attr_t attributes;
  REQUIRE(pthread_attr_init(&attributes) == 0);
  REQUIRE(pthread_attr_setstacksize(&attributes, frames_are_real ? stack_bytes : 8 << 20) == 0);
  pthread_t thread;
  const auto call = [](void* x) -> void* {
    (*static_cast<const std::function<void()>*>(x))();
    return nullptr;
  };
  void* const argument = const_cast<std::function<void()>*>(&f);
  REQUIRE(pthread_create(&thread, &attributes, call, argument) == 0);
  REQUIRE(pthread_join(thread, nullptr) == 0);
  pthread_attr_destroy(&attributes);
}

TEST_CASE("every policy decodes on a thread of 128 KiB of stack", "[stack]") {
  constexpr index_t dim = 128, group = 4, tokens = frames_are_real ? 700 : 260,
                    steps = frames_are_real ? 40 : 20;
  for (const auto& example : fixtures::every_policy()) {
    CAPTURE(example.name);
    const kvmeld::any_policy_or_peer& policy = example.policy;
    fixtures::cache<Eigen::half> kv{
        {.heads = 1, .group = group, .dim = dim, .capacity = tokens + steps + 1}};
    const budget limit = kvmeld::budget_within(policy, 200);
    const auto k = normal((tokens + steps) * dim), v = normal((tokens + steps) * dim),
               q = normal((tokens + steps) * group * dim);
    auto state = fixtures::make_state(policy, kv);
    kv.append(0, std::span(k).first(tokens * dim), std::span(v).first(tokens * dim));
    const auto queries = kvmeld::prompt_queries(q.data(), tokens, 1, group, dim);
    fixtures::observe(policy, kv, state, queries);
    fixtures::compress(policy, kv, state, queries.last(200), limit);
    std::string said;
    on_small_stack([&] {
      try {
        std::vector<float> out(group * dim);
        for (index_t t = tokens; t < tokens + steps && kvmeld::declared(policy).supports_decode();
             ++t) {
          const auto at = [t](const std::vector<float>& x, index_t width) {
            return std::span<const float>(x).subspan(static_cast<std::size_t>(t * width),
                                                     static_cast<std::size_t>(width));
          };
          fixtures::step(policy, kv, state, {at(q, group * dim), at(k, dim), at(v, dim)}, limit,
                         out);
        }
      } catch (const std::exception& e) {
        said = e.what();
      }
    });
    CHECK(said.empty());
    CHECK(kv.head(0).next_position() ==
          (kvmeld::declared(policy).supports_decode() ? tokens + steps : tokens));
  }
}
#endif

}  // namespace stack_test
