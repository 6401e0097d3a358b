// SPDX-License-Identifier: MIT
// Layers of a request free their batches in turn: no step plans for many heads.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"

namespace turns_test {

using kvmeld::budget;
using kvmeld::index_t;

/// Keeps the latest tokens, and frees `batch` slots at once.
struct latest {
  index_t batch = 1;

  static constexpr std::string_view name() { return "latest"; }
  float score(const kvmeld::head_ref& head, const kvmeld::head_state&, index_t slot) const {
    return static_cast<float>(head.position(slot));
  }
  index_t eviction_batch(index_t) const { return batch - 1; }
};

constexpr index_t layers = 4, kv_heads = 2, heads = layers * kv_heads, dim = 2, slots = 24;

/// Heads that are planned for in each of `steps` steps after a prompt of `tokens`, and the slots
/// that each plan frees.
struct counted {
  std::vector<index_t> planned;
  std::vector<std::vector<index_t>> freed = std::vector<std::vector<index_t>>(heads);

  counted(index_t batch, index_t tokens, index_t steps, const budget& b) {
    kvmeld::cache kv({.kv_heads = kv_heads, .key_dim = dim}, {.layers = layers, .capacity = 64});
    kvmeld::compressor meld(kv, latest{batch}, b);
    const std::vector<float> row(kv_heads * dim, 1.0F), all(as_size(tokens) * row.size(), 1.0F);
    std::vector<float> out(row.size());
    for (index_t l = 0; l < layers; ++l) {
      kv.append(kv.heads(l, 0), all, all, tokens);
    }
    meld.end_prompt(0);
    for (index_t t = 0; t < steps; ++t) {
      planned.push_back(0);
      for (index_t l = 0; l < layers; ++l) {
        std::vector<index_t> before;
        for (index_t h = 0; h < kv_heads; ++h) {
          before.push_back(kv.head(l * kv_heads + h).length());
        }
        meld.step(kv.heads(l, 0), {row, row, row}, out);
        for (index_t h = 0; h < kv_heads; ++h) {
          const index_t now = kv.head(l * kv_heads + h).length(), was = before[as_size(h)];
          CHECK(now <= slots);
          if (now <= was) {
            ++planned.back();
            freed[as_size(l * kv_heads + h)].push_back(was + 1 - now);
          }
        }
      }
    }
  }
  static std::size_t as_size(index_t n) { return static_cast<std::size_t>(n); }
};

TEST_CASE("layers free their batches in turn, whatever the prompt's length", "[turns]") {
  const index_t batch = GENERATE(1, 2, 3, 8, 20), tokens = GENERATE(10, 24, 31);
  CAPTURE(batch, tokens);
  const index_t first = std::max(slots - tokens, index_t{0});  // the step of the first plans
  const counted run(batch, tokens, first + 5 * batch, {slots});
  REQUIRE(run.planned[counted::as_size(first)] == heads);
  for (const auto& freed : run.freed) {
    REQUIRE(freed.size() > 3);
    CHECK((freed[0] >= 1 && freed[0] <= batch));
    for (std::size_t i = 1; i < freed.size(); ++i) {
      CHECK(freed[i] == batch);
    }
  }
  const index_t most = (layers + batch - 1) / batch * kv_heads;
  for (std::size_t t = counted::as_size(first) + 1; t < run.planned.size(); ++t) {
    CHECK(run.planned[t] <= most);
  }
}

TEST_CASE("a trigger that is asked for is kept to by all heads", "[turns]") {
  const counted run(3, 24, 24, {slots - 5, slots + 1});
  for (const auto& freed : run.freed) {
    CHECK(std::ranges::all_of(freed, [](index_t n) { return n == 6; }));
  }
}

}  // namespace turns_test
