// Compresses one prompt's cache and decodes a token on it. The middle of main is the README's
// snippet.
#include <fmt/core.h>

#include <random>
#include <vector>

#include "kvmeld/kvmeld.hpp"

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& y : x) {
      y = normal(random);
    }
    return x;
  };
  const int heads = 8, group = 4, dim = 128, prompt = 2048;
  const auto queries = numbers(prompt * heads * group * dim);  // [prompt, heads · group, dim]
  const auto q = numbers(heads * group * dim), k = numbers(heads * dim), v = numbers(heads * dim);
  std::vector<float> out(q.size());

  // clang-format off
  kvmeld::cache kv({.kv_heads = heads, .group = group, .key_dim = dim}, {.capacity = 4096});
  const auto keys = numbers(prompt * heads * dim), values = numbers(prompt * heads * dim);
  kv.append(kv.heads(0, 0), keys, values, prompt);                    // [prompt, kv_heads, dim]
  kvmeld::h2o policy{.recent = 0.25F};                                // any policy; they are values
  kvmeld::budget budget{.slots = 205};                               // slots a head
  auto state = kvmeld::make_state(policy, kv);

  auto reference = kvmeld::prompt_queries(queries.data(), prompt, heads, group, dim);
  kvmeld::compress(policy, kv, state, reference, budget);             // 2048 → 205 slots a head

  kvmeld::step(policy, kv, state, {q, k, v}, budget, out);            // one token: attend, observe,
                                                                      // back to the budget
  // clang-format on
  fmt::print("{} tokens in {} slots a head: {:.1f} MiB instead of {:.1f}\n",
             kv.head(0).next_position(), kv.head(0).length(),
             static_cast<double>(kv.bytes() + state.bytes()) / 1048576.0,
             2.0 * heads * dim * sizeof(float) * (prompt + 1) / 1048576.0);
}
