// SPDX-License-Identifier: MIT
// What R-KV holds of the queries that it measures on.
#include <catch2/catch.hpp>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"

namespace r_kv_test {

TEST_CASE("r_kv holds the latest queries, whether they come as one prompt or as two", "[r_kv]") {
  const kvmeld::index_t dim = 6, group = 2, tokens = 12, second = 2;
  const kvmeld::r_kv policy{.window = 8};
  const auto keys = fixtures::normal(tokens * dim), values = fixtures::normal(tokens * dim);
  const fixtures::queries asked(tokens, group, dim);
  const auto held = [&](kvmeld::index_t later) {
    kvmeld::cache kv(kvmeld::attention_spec{.kv_heads = 1, .group = group, .key_dim = dim},
                     {.capacity = tokens});
    auto state = kvmeld::make_head_state(policy, kv.head(0));
    for (kvmeld::index_t begin = 0; begin < tokens;) {
      const kvmeld::index_t count = begin == 0 ? tokens - later : later;
      const auto from = static_cast<std::size_t>(begin * dim),
                 n = static_cast<std::size_t>(count * dim);
      kv.append(kv.heads(0, 0), std::span(keys).subspan(from, n),
                std::span(values).subspan(from, n), count);
      state.extend(kv.head(0).length());
      kvmeld::observe(policy, kv.head(0), state,
                      kvmeld::prompt_queries(&asked.data[from * group], count, 1, group, dim));
      begin += count;
    }
    return std::vector<float>(state.memory().begin(), state.memory().end());
  };
  const auto once = held(0), twice = held(second);
  CHECK(once[0] == 8);
  CHECK((once == twice));
}

}  // namespace r_kv_test
