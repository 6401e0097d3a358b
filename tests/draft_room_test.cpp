// SPDX-License-Identifier: MIT
// How many drafted tokens attend to what they would as steps.
#include <algorithm>  // std::ranges::equal
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace draft_room_test {

using namespace small_model;
using Catch::Contains;
using kvmeld::budget;

/// Rows of `tokens` tokens of a layer, and those of one of them.
struct token_rows {
  std::vector<float> q, k, v;

  explicit token_rows(index_t tokens)
      : q(normal(tokens * kv_heads_of * group * dim)),
        k(normal(tokens * kv_heads_of * dim)),
        v(normal(tokens * kv_heads_of * dim)) {}
  kvmeld::step_input of(index_t t) const {
    const auto row = [&](const std::vector<float>& x, index_t n) {
      return std::span(x).subspan(static_cast<std::size_t>(t * n), static_cast<std::size_t>(n));
    };
    return {row(q, kv_heads_of * group * dim), row(k, kv_heads_of * dim),
            row(v, kv_heads_of * dim)};
  }
};

TEST_CASE("draft_room: so many drafted tokens have the outputs of steps, of every policy") {
  constexpr index_t width = kv_heads_of * group * dim, capacity = 64;
  int within = 0, beyond = 0;
  for (const fixtures::example& e : fixtures::every_policy()) {
    if (!kvmeld::declared(e.policy).supports_decode()) {
      continue;
    }
    for (const budget& limit : {budget{.slots = 40}, budget{.slots = 40, .trigger = 46},
                                budget::shared(40, 5), budget::same_tokens(40, 5)}) {
      if (limit.is_shared) {
        try {
          (void)kvmeld::for_shared(e.policy, limit.slots, limit.slack, limit.alike);
        } catch (const kvmeld::error&) {
          continue;
        }
      }
      CAPTURE(e.name, limit.trigger, limit.slack, limit.alike);
      model_cache kv(capacity);
      kvmeld::compressor meld(kv, e.policy, limit);
      read(meld, kv, prompt_rows(60), 0, 60);
      meld.end_prompt(0);
      for (int round = 0; round < 4; ++round) {
        meld.copy(0, 1);
        const index_t room = meld.draft_room(0);
        index_t most = capacity;
        for (const index_t h : {2, 3, 6, 7}) {
          most = std::min(most, capacity - kv.head(h).length());
        }
        REQUIRE(room == meld.draft_room(1));
        if (most == 0) {
          break;  // full_cache
        }
        const index_t tokens = std::min(room + 1, most);
        bool last_differs = false;
        for (index_t l = 0; l < layers_of; ++l) {
          const token_rows x(tokens);
          std::vector<float> drafted(static_cast<std::size_t>(tokens * width)), one(width);
          meld.draft(model_cache::of(l, 1), {x.q, x.k, x.v}, drafted, tokens);
          for (index_t t = 0; t < tokens; ++t) {
            const index_t next = kv.head(model_cache::of(l, 0).first).next_position();
            auto in = x.of(t);  // several tokens of a layer before the next layer
            in.positions = {&next, 1};
            meld.step(model_cache::of(l, 0), in, one);
            const bool same = std::ranges::equal(
                one, std::span(drafted).subspan(static_cast<std::size_t>(t * width), width));
            if (t < room) {
              CHECK(same);
              ++within;
            }
            last_differs = last_differs || !same;
          }
        }
        beyond += last_differs ? 1 : 0;
        meld.accept(1, tokens);
      }
    }
  }
  CHECK(within > 1000);
  CHECK(beyond > 100);
}

TEST_CASE("draft_room: free slots where nothing is evicted, refused while something is open") {
  model_cache kv(70);
  kvmeld::compressor meld(kv, kvmeld::full_cache{}, budget{.slots = 70});
  const prompt_rows x(60);
  read(meld, kv, x, 0, 60);
  CHECK_THROWS_WITH(meld.draft_room(0), Contains("draft_room: expected end_prompt first"));
  meld.end_prompt(0);
  CHECK(meld.draft_room(0) == 10);
  const token_rows drafted(3);
  std::vector<float> out(static_cast<std::size_t>(3 * kv_heads_of * group * dim));
  meld.draft(model_cache::of(0, 0), {drafted.q, drafted.k, drafted.v}, out, 3);
  CHECK_THROWS_WITH(meld.draft_room(0), Contains("draft_room: expected accept first"));
  CHECK_THROWS_WITH(meld.draft_room(2), Contains("draft_room: expected a request of 0 to 1"));
}

}  // namespace draft_room_test
