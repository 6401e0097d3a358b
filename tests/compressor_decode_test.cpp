// SPDX-License-Identifier: MIT
// Drafted tokens, and NaN of one request beside others.
#include <algorithm>  // std::ranges::equal
#include <catch2/catch.hpp>
#include <limits>
#include <utility>  // std::pair
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace compressor_decode_test {

using namespace small_model;
using kvmeld::budget;

TEST_CASE("compressor: drafted tokens count as steps would, to the bit, or were never there") {
  for (const auto& example : fixtures::every_policy()) {
    if (!kvmeld::declared(example.policy).supports_decode()) {
      continue;
    }
    const index_t tokens = 60, slots = 48, drafted = 4;
    for (const auto& [accepted, shared] :
         {std::pair(0, false), {2, false}, {4, false}, {4, true}}) {
      if (shared && !kvmeld::declared(example.policy).shares()) {
        continue;
      }
      CAPTURE(example.name, accepted, shared);
      model_cache kv(128), plain(128);
      const prompt_rows prompt(tokens);
      const budget limit = shared ? budget::shared(slots) : budget{.slots = slots};
      kvmeld::compressor meld(kv, example.policy, limit);
      kvmeld::compressor steps(plain, example.policy, limit);
      read(meld, kv, prompt, 0, tokens), meld.end_prompt(0);
      read(steps, plain, prompt, 0, tokens), steps.end_prompt(0);
      for (index_t round = 0; round < 3; ++round) {
        const index_t heads = kv_heads_of, rows = heads * group * dim;
        std::vector<std::vector<float>> q, k, v, outs;
        for (index_t l = 0; l < layers_of; ++l) {
          q.push_back(normal(drafted * rows)), k.push_back(normal(drafted * heads * dim));
          v.push_back(normal(drafted * heads * dim)), outs.push_back(q.back());
          const index_t before = kv.head(model_cache::of(l, 0).first).length();
          meld.draft(model_cache::of(l, 0), {q.back(), k.back(), v.back()}, outs.back(), drafted);
          CHECK(kv.head(model_cache::of(l, 0).first).length() == before);
        }
        for (index_t t = 0; t < accepted; ++t) {
          for (index_t l = 0; l < layers_of; ++l) {
            const auto of = [&](const std::vector<std::vector<float>>& x, index_t each) {
              return std::span(x[static_cast<std::size_t>(l)])
                  .subspan(static_cast<std::size_t>(t * each), static_cast<std::size_t>(each));
            };
            std::vector<float> wanted(static_cast<std::size_t>(rows));
            steps.step(model_cache::of(l, 0), {of(q, rows), of(k, heads * dim), of(v, heads * dim)},
                       wanted);
            if (t == 0) {  // nothing was evicted in between
              CHECK(std::ranges::equal(wanted, of(outs, rows)));
            }
          }
        }
        CHECK_THROWS_WITH(meld.accept(0, drafted + 1), Catch::Contains("at most 4 drafted"));
        meld.accept(0, accepted);
        for (index_t l = 0; l < layers_of; ++l) {
          for (index_t i = 0; i < kv_heads_of; ++i) {
            const index_t h = model_cache::of(l, 0).first + i;
            CAPTURE(h);
            CHECK(same_head(kv.head(h), plain.head(h)));
            CHECK(same_state(meld.state(h), steps.state(h)));
            CHECK(meld.limit(h).slots == steps.limit(h).slots);
          }
        }
      }
    }
  }
}

TEST_CASE("compressor: NaN of one request leaves the others' bits alone") {
  for (const auto& example : fixtures::every_policy()) {
    if (!kvmeld::declared(example.policy).supports_decode()) {
      continue;
    }
    CAPTURE(example.name);
    const index_t tokens = 60, heads = requests_of * kv_heads_of, rows = group * dim;
    model_cache kv(128), alone(128);
    const prompt_rows prompt(tokens);
    kvmeld::compressor meld(kv, example.policy, budget{.slots = 48, .trigger = 49});
    kvmeld::compressor other(alone, example.policy, budget{.slots = 48, .trigger = 49});
    for (index_t r = 0; r < requests_of; ++r) {
      read(meld, kv, prompt, r, tokens), meld.end_prompt(r);
      read(other, alone, prompt, r, tokens), other.end_prompt(r);
    }
    const kvmeld::head_state state = meld.state(1);
    const index_t next = kv.head(1).next_position();
    auto q = normal(heads * rows), k = normal(heads * dim), v = normal(heads * dim);
    k[static_cast<std::size_t>(dim)] = std::numeric_limits<float>::quiet_NaN();  // of head 1
    std::vector<float> out(q.size()), wanted(static_cast<std::size_t>(kv_heads_of * rows));
    try {
      meld.step(kvmeld::head_range{0, heads}, {q, k, v}, out);
      FAIL("taken");
    } catch (const kvmeld::error& e) {
      CHECK(e.code() == kvmeld::errc::not_finite);
      CHECK_THAT(e.what(), Catch::Contains("NaN or Inf in head 1 "));
    }
    CHECK(kv.head(1).next_position() == next);
    CHECK(same_state(meld.state(1), state));
    const auto last = [](const std::vector<float>& x) { return std::span(x).last(x.size() / 2); };
    other.step(model_cache::of(0, 1), {last(q), last(k), last(v)}, wanted);
    CHECK(std::ranges::equal(wanted, last(out)));
    for (index_t h = kv_heads_of; h < heads; ++h) {
      CHECK(same_head(kv.head(h), alone.head(h)));
    }
  }
}

}  // namespace compressor_decode_test
