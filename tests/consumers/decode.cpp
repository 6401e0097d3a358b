#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "engine.hpp"

double decode(int tokens) {
  const kvfold::index_t heads = 2, group = 2, dim = 8;
  std::uint32_t bits = 1;
  const auto numbers = [&](kvfold::index_t n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& y : x) {
      bits = bits * 1664525U + 1013904223U;
      y = static_cast<float>(bits >> 8) / 8388608.0F - 1.0F;
    }
    return x;
  };
  const kvfold::h2o policy{.recent = 0.25F};
  kvfold::cache<float> kv{{.heads = heads, .group = group, .dim = dim, .capacity = 17}};
  auto state = kvfold::make_state(policy, kv);
  std::vector<float> out(static_cast<std::size_t>(heads * group * dim));
  double sum = 0;
  for (int t = 0; t < tokens; ++t) {
    const auto q = numbers(heads * group * dim), k = numbers(heads * dim), v = numbers(heads * dim);
    kvfold::step(policy, kv, state, std::span<const float>(q), std::span<const float>(k),
                 std::span<const float>(v), kvfold::budget{.target = 16}, std::span<float>(out));
    sum = std::accumulate(out.begin(), out.end(), sum);
  }
  return sum;
}
