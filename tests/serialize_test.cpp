// A saved cache goes on bit for bit.
#include "kvfold/serialize.hpp"

#include <catch2/catch.hpp>

#include "support/fixtures.hpp"
#include "support/policies.hpp"
#include "support/saved.hpp"

namespace {

using fixtures::everything;
using fixtures::index_t;
using fixtures::normal;
using fixtures::saved;
using kvfold::budget;

template <class Scalar>
kvfold::cache<Scalar> two_heads() {
  return kvfold::cache<Scalar>{{.heads = 2, .group = 2, .dim = 8, .capacity = 192}};
}

/// A cache with a prompt behind it, and what is given to it on the way.
template <class Policy, class Scalar>
struct session {
  Policy policy;
  kvfold::cache<Scalar> kv = two_heads<Scalar>();
  kvfold::state state = kvfold::make_state(policy, kv);

  void prompt(std::span<const float> numbers) {
    for (index_t h = 0; h < 2; ++h) {
      const auto at = [&](index_t i) {
        return numbers.subspan(static_cast<std::size_t>(320 * i), 320);
      };
      kvfold::append_rows(kv.head(h), at(h), at(h + 2));
    }
    kvfold::compress(policy, kv, state, kvfold::prompt_queries(numbers.data(), 40, 2, 2, 8),
                     budget{40});
  }
  std::vector<float> step(std::span<const float> numbers) {
    std::vector<float> out(32);
    kvfold::step(policy, kv, state, numbers.first(32), numbers.subspan(32, 16),
                 numbers.subspan(48, 16), budget{40, 42}, out);
    return out;
  }
};

/// LAW: in the middle of a stream, a cache that was saved and loaded goes on as the one it was.
template <class Scalar, class Policy>
void goes_on(const std::string& name, const Policy& policy) {
  INFO(name);
  const bool decodes = kvfold::traits::decodes(policy);
  session<Policy, Scalar> one{policy}, other{policy};
  one.prompt(normal(1280)), one.prompt(normal(1280));
  for (int t = 0; t < 25 && decodes; ++t) {
    one.step(normal(64));
  }
  other.prompt(normal(1280));  // what it held is gone afterwards
  const std::string bytes = saved(policy, one.kv, one.state);
  std::istringstream in(bytes + "more");
  kvfold::load(in, policy, other.kv, other.state);
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

}  // namespace

TEST_CASE("a loaded cache goes on bit for bit", "[serialize]") {
  for (const auto& example : fixtures::every_policy()) {
    goes_on<float>(example.name, example.policy);
  }
}

// To compile every policy for every scalar would take minutes: all are saved and loaded, and those
// go on whose state is of every kind (maxima, sums, memory with integers).
TEMPLATE_TEST_CASE("a loaded cache of 16-bit numbers is the one that was saved, and goes on",
                   "[serialize]", Eigen::half, Eigen::bfloat16) {
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    auto one = two_heads<TestType>(), other = two_heads<TestType>();
    auto state = kvfold::make_state(example.policy, one);
    auto loaded = kvfold::make_state(example.policy, other);
    for (index_t h = 0; h < 2; ++h) {
      one.append(h, normal(20 * 8), normal(20 * 8));
      state[h].extend(20);
      for (index_t c = 0; c < state[h].columns(); ++c) {
        std::ranges::copy(normal(20), state[h].column(c).begin());
      }
      for (float& x : state[h].memory()) {
        x = std::bit_cast<float>(static_cast<std::uint32_t>(fixtures::random_bits()()));
      }
    }
    std::istringstream in(saved(example.policy, one, state));
    kvfold::load(in, example.policy, other, loaded);
    CHECK(everything(other, loaded) == everything(one, state));
  }
  goes_on<TestType>("h2o", kvfold::h2o{});
  goes_on<TestType>("zsmerge", kvfold::zsmerge{.residual = 3});
  goes_on<TestType>("fold", kvfold::fold{});
}
