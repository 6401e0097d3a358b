// Uses a policy that the library has never heard of (custom_policy.hpp), as any other.
#include "custom_policy.hpp"

#include <fmt/core.h>

#include <random>
#include <vector>

#include "kvfold/kvfold.hpp"

int main() {
  constexpr kvfold::index_t tokens = 1024, dim = 64, target = 128;
  kvfold::cache<float> kv{{.heads = 1, .dim = dim, .capacity = tokens}};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> keys(tokens * dim), values(tokens * dim);
  for (auto* x : {&keys, &values}) {
    for (float& y : *x) {
      y = normal(random);
    }
  }
  kv.append(0, keys, values);

  const custom::lowest_norm policy{.recent = 32};
  auto state = kvfold::make_state(policy, kv);
  kvfold::compress(policy, kv, state, kvfold::no_queries, kvfold::budget{target});
  fmt::print("{}: {} tokens in {} slots, {} bytes\n", policy.name(), tokens, kv.head(0).length(),
             kv.bytes());
}
