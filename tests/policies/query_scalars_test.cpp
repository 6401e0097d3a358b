// SPDX-License-Identifier: MIT
// A policy's queries in 16 bits are what they are in float: with all that comes beside them.
#include <catch2/catch.hpp>
#include <numeric>  // std::iota
#include <vector>

#include "support/model.hpp"
#include "support/policies.hpp"

namespace query_scalars_test {

using namespace small_model;

constexpr index_t tokens = 60, slots = 48;

/// The queries of a prompt's tokens, of two KV heads, as `T` and as the same numbers in float.
template <class T>
struct both_queries {
  std::vector<T> own = fixtures::normal<T>(tokens * 2 * group * dim);
  std::vector<float> floats{own.begin(), own.end()};

  /// Calls `use` with the second head's view of either.
  void views(auto use) const {
    use(kvmeld::prompt_queries(own.data(), tokens, 2, group, dim).of(1),
        kvmeld::prompt_queries(floats.data(), tokens, 2, group, dim).of(1));
  }
};

/// A head measured on each of the two views, and brought to its budget on them.
template <class T>
void check(const kvmeld::any_policy_or_peer& p, const kvmeld::cache& prompt,
           const kvmeld::query_view<T>& own, const kvmeld::query_view<float>& floats) {
  kvmeld::cache a = prompt, b = prompt;
  auto measured = make_head_state(p, a.head(0)), wanted = make_head_state(p, b.head(0));
  kvmeld::observe(p, a.head(0), measured, own);
  kvmeld::observe(p, b.head(0), wanted, floats);
  CHECK(same_state(measured, wanted));
  kvmeld::workspace work;
  kvmeld::compress(p, a.head(0), measured, work, kvmeld::budget{slots}, own);
  kvmeld::compress(p, b.head(0), wanted, work, kvmeld::budget{slots}, floats);
  CHECK((same_head(a.head(0), b.head(0)) && same_state(measured, wanted)));
}

template <class T>
void check_every_policy() {
  kvmeld::attention_spec spec{.kv_heads = 1, .group = group, .key_dim = dim};
  spec.rope = kvmeld::rotary::halves(10'000);
  auto all = fixtures::every_policy();
  const auto output = normal(3 * group * dim);  // kvzip's projection, [3, group, dim]
  all.push_back(
      {"kvzip plus", kvmeld::kvzip{.plus = true, .output = {output.data(), 3, group * dim}}});
  std::vector<float> log_sum_exp(static_cast<std::size_t>(group * tokens)),
      hidden_norm(static_cast<std::size_t>(tokens));
  std::iota(log_sum_exp.begin(), log_sum_exp.end(), 3.0F);
  std::iota(hidden_norm.begin(), hidden_norm.end(), 1.0F);
  std::vector<index_t> position(static_cast<std::size_t>(tokens));
  std::iota(position.begin(), position.end(), 0);
  for (const auto& example : all) {
    CAPTURE(example.name);
    kvmeld::cache kv(spec, {.capacity = tokens});
    kv.append(kv.heads(0, 0), normal(tokens * dim), normal(tokens * dim), tokens);
    both_queries<T>().views([&](auto own, auto floats) {
      if (example.name != "kvzip plus") {  // which needs the norms
        check(example.policy, kv, own, floats);
        check(example.policy, kv, own.last(20), floats.last(20));  // with those before them
      }
      own.log_sum_exp = floats.log_sum_exp = log_sum_exp.data();
      own.hidden_norm = floats.hidden_norm = hidden_norm.data();
      check(example.policy, kv, own, floats);
      own.position = floats.position = position.data();
      check(example.policy, kv, own, floats);
    });
  }
}

TEST_CASE("queries in 16 bits are what they are in float, for every policy", "[queries]") {
  check_every_policy<Eigen::half>();
  check_every_policy<Eigen::bfloat16>();
}

}  // namespace query_scalars_test
