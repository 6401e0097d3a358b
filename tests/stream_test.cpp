// 100,000 tokens through every policy: constant memory, no allocation, sinks still there, no NaN.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <new>

#include "support/allocations.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

std::atomic<std::size_t> fixtures::allocations = 0;
using fixtures::allocations;

// Every allocation of the test program is counted: new here, and malloc, which Eigen calls for its
// aligned blocks, through the linker (--wrap=malloc).
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) {
    return p;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

extern "C" {
void* __real_malloc(std::size_t bytes);  // NOLINT: the linker's names
void* __wrap_malloc(std::size_t bytes) {
  ++allocations;
  return __real_malloc(bytes);
}
}

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

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr index_t tokens = 10'000;  // twenty times slower
#else
constexpr index_t tokens = 100'000;
#endif

/// So many tokens in one head: constant memory, no allocation, sinks still there, no NaN.
void stream(const kvfold::any_policy& policy, index_t trigger) {
  const index_t dim = 16, group = 2;
  const kvfold::budget budget =
      trigger == 0 ? kvfold::budget_within(policy, 64) : kvfold::budget{64, trigger};
  kvfold::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 72}};
  auto state = kvfold::make_state(policy, kv);
  const std::size_t bytes = kv.bytes();
  const auto numbers = fixtures::normal(4096);  // drawn once: the loop itself must not allocate
  std::vector<float> out(static_cast<std::size_t>(group * dim));
  const auto at = [&](index_t t, index_t n) {
    return std::span(numbers).subspan(static_cast<std::size_t>((t * 61) % (4096 - n)),
                                      static_cast<std::size_t>(n));
  };
  std::size_t before = 0;
  double sum = 0;
  for (index_t t = 0; t < tokens; ++t) {
    if (t == 200) {  // warm: every path has been taken
      before = allocations;
    }
    kvfold::step(policy, kv, state, at(t, group * dim), at(t + 7, dim), at(t + 11, dim), budget,
                 out);
    sum += static_cast<double>(out[0]);
  }
  const std::size_t made = allocations - before;
  CHECK(made == 0);
  CHECK(std::isfinite(sum));
  CHECK(bytes == 0);
  const auto head = kv.head(0);
  CHECK(head.length() >= budget.target);
  CHECK(head.length() < budget.trigger_length());
  CHECK(head.seen() == tokens);
  index_t sinks = 0;
  for (index_t s = 0; s < head.length(); ++s) {
    sinks += head.position(s) < 4 ? 1 : 0;
    for (index_t i = 0; i < dim; ++i) {
      CHECK_FALSE(std::isnan(head.key(s)[i]));
      CHECK_FALSE(std::isnan(head.value(s)[i]));
    }
  }
  CHECK(sinks == 4);
}

}  // namespace

TEST_CASE("100,000 tokens run in constant memory", "[stream]") {
  const index_t trigger = GENERATE(0, 72);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] :
       fixtures::every_policy()) {
    INFO(name << ", trigger " << trigger);
    if (policy.bounded() && policy.decodes()) {
      stream(policy, trigger);
    }
  }
}
