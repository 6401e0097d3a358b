// SPDX-License-Identifier: MIT
// An engine that orchestrates by itself: by the functions of one head it does to a prompt what a
// compressor does, to the bit.
#include <algorithm>  // std::ranges::equal
#include <bit>        // std::bit_cast
#include <catch2/catch.hpp>
#include <cstdint>  // std::uint32_t
#include <vector>

#include "kvmeld/peers.hpp"
#include "oracle/budgets.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace prompt_by_hand_test {

using fixtures::index_t;
using fixtures::normal;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

constexpr index_t layers = 2, tokens = 90, slots = 48;

kvmeld::attention_spec rotated() {
  kvmeld::attention_spec s{.kv_heads = 2, .group = 2, .key_dim = 16};
  s.rope = kvmeld::rotary::halves(10'000);
  return s;
}
const kvmeld::attention_spec spec = rotated();

/// Two caches of the same two layers: a compressor's, and one that is compressed by hand.
struct two_caches {
  kvmeld::cache theirs{spec, {.layers = layers, .capacity = tokens + 1}}, by_hand = theirs;
  std::vector<float> q;  // [tokens, heads · group, dim] of a chunk

  /// Appends the next tokens of a layer to both. Their queries.
  kvmeld::queries append(index_t layer, index_t count) {
    const auto k = normal(count * 2 * 16), v = normal(count * 2 * 16);
    for (kvmeld::cache* kv : {&theirs, &by_hand}) {
      kv->append(kv->heads(layer, 0), k, v, count);
    }
    q = normal(count * 4 * 16);
    return {q, count, spec};
  }
};

void expect_same(const kvmeld::head_ref& a, const kvmeld::head_state& s, const kvmeld::head_ref& b,
                 const kvmeld::head_state& t) {
  const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  REQUIRE(a.length() == b.length());
  for (index_t i = 0; i < a.length(); ++i) {
    CHECK((a.position(i) == b.position(i) && bits(a.log_mass(i)) == bits(b.log_mass(i))));
    for (index_t d = 0; d < a.dim(); ++d) {
      CHECK((a.key(i)[d] == b.key(i)[d] && a.value(i)[d] == b.value(i)[d]));
    }
  }
  REQUIRE((s.length() == t.length() && s.slot_stats() == t.slot_stats()));
  for (index_t c = 0; c < s.slot_stats(); ++c) {
    CHECK(std::ranges::equal(s.column(c), t.column(c), {}, bits, bits));
  }
  CHECK(std::ranges::equal(s.memory(), t.memory(), {}, bits, bits));
  CHECK(s.observed() == t.observed());
}

/// The prompt in two chunks through a compressor, and by hand; the slots of each head by `divide`.
template <class Divide>
void compare(const any_policy& given, const any_policy& p, const budget& b, Divide divide) {
  two_caches x;
  kvmeld::compressor meld(x.theirs, given, b);
  std::vector<kvmeld::head_state> states;
  std::vector<kvmeld::held_queries> held(static_cast<std::size_t>(x.by_hand.heads()));
  for (index_t h = 0; h < x.by_hand.heads(); ++h) {
    states.push_back(make_head_state(p, x.by_hand.head(h)));
  }
  for (index_t l = 0; l < layers; ++l) {
    for (const index_t count : {50, tokens - 50}) {
      const kvmeld::queries own = x.append(l, count);
      meld.prompt(x.theirs.heads(l, 0), own);
      for (index_t k = 0; k < 2; ++k) {
        const auto h = static_cast<std::size_t>(2 * l + k);
        own.of_head(k, [&](const auto& view) {
          observe_prompt(p, x.by_hand.head(2 * l + k), states[h], held[h], view);
        });
      }
    }
  }
  meld.end_prompt(0);
  const std::vector<index_t> each = divide(x.by_hand, states);
  kvmeld::workspace work;
  for (index_t h = 0; h < x.by_hand.heads(); ++h) {
    const auto i = static_cast<std::size_t>(h);
    const kvmeld::head_ref head = x.by_hand.head(h);
    const auto queries = planned_queries(p, head, states[i], held[i]);
    check_compress(p, head, states[i], {each[i]}, queries.count > 0);
    compress(p, head, states[i], work, {each[i]}, queries);
    kvmeld::head_state theirs = meld.state(h);
    if (theirs.rests()) {
      const kvmeld::decode_use use = kvmeld::declared(p).decode_use();
      states[i].rest(use.columns, use.memory);
      theirs.extend(theirs.length()), states[i].extend(theirs.length());
    }
    expect_same(x.theirs.head(h), theirs, head, states[i]);
  }
}

TEST_CASE("one head: a prompt by hand is a compressor's, for every policy") {
  for (const auto& example : fixtures::every_policy()) {
    CAPTURE(example.name);
    compare(example.policy, example.policy, {.slots = slots}, [](auto& kv, auto&) {
      return std::vector(static_cast<std::size_t>(kv.heads()), slots);
    });
  }
}

TEST_CASE("one head: slots that heads share are divided by hand as a compressor divides them") {
  for (const char* name :
       {"fold", "h2o", "snapkv:window=8", "kvmerger", "scissorhands", "keepkv"}) {
    CAPTURE(name);
    const auto own = kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
               p = kvmeld::for_shared(own, slots);
    compare(own, p, budget::shared(slots), [&](kvmeld::cache& kv, auto& states) {
      const auto shared = kvmeld::shared_slots::of(p);
      std::vector<std::vector<float>> scores;
      for (index_t h = 0; h < kv.heads(); ++h) {
        std::vector<float> of_slots(tokens);
        kvmeld::declared(p).shared_scores(kv.head(h), states[static_cast<std::size_t>(h)],
                                          of_slots);
        kvmeld::add_shared_scores(kv.head(h), of_slots, shared, scores.emplace_back());
      }
      const auto each = kvmeld::divide_slots(scores, shared, slots, tokens);
      index_t sum = 0;
      for (const index_t n : each) {
        sum += n;
      }
      CHECK(sum == kv.heads() * slots);
      CHECK(each != std::vector(each.size(), slots));
      CHECK(kvmeld::divide_slots(scores, shared, tokens, tokens) ==
            std::vector(each.size(), tokens));
      return each;
    });
  }
}

TEST_CASE("one head: heads of a layer that share by layer have equal slots, by composite scores") {
  int uneven = 0;
  for (const char* name : {"fold", "h2o", "snapkv:window=8"}) {
    CAPTURE(name);
    const auto own = kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
               p = kvmeld::for_shared(own, slots);
    compare(own, p, budget::shared_by_layer(slots), [&](kvmeld::cache& kv, auto& states) {
      const auto shared = kvmeld::shared_slots::of(p);
      std::vector<oracle::mat> scores(layers);
      for (index_t h = 0; h < kv.heads(); ++h) {
        std::vector<float> of_slots(tokens), of_head;
        kvmeld::declared(p).shared_scores(kv.head(h), states[static_cast<std::size_t>(h)],
                                          of_slots);
        kvmeld::add_shared_scores(kv.head(h), of_slots, shared, of_head);
        scores[static_cast<std::size_t>(h / 2)].emplace_back(of_head.begin(), of_head.end());
      }
      std::vector<index_t> each;
      for (const int more : oracle::composite_budgets(scores, layers * (slots - shared.own),
                                                      tokens - shared.own - 1)) {
        each.insert(each.end(), 2, shared.own + more);
      }
      CHECK(each.front() + each.back() == layers * slots);
      uneven += each.front() != slots ? 1 : 0;
      return each;
    });
  }
  CHECK(uneven > 0);
}

TEST_CASE("one head: what cannot be shared or compressed is refused by name") {
  using Catch::Contains;
  for (const char* name : {"streaming_llm", "full_cache", "cam"}) {
    CHECK_THROWS_WITH(
        kvmeld::for_shared(kvmeld::make_policy<kvmeld::any_policy_or_peer>(name), slots),
        Contains(std::string(name) + ": expected a policy with a score per slot"));
  }
  CHECK_THROWS_WITH(kvmeld::for_shared(kvmeld::fold{}, 3), Contains("slots to share, got 3"));
  two_caches x;
  x.append(0, tokens);
  const kvmeld::h2o p;
  const kvmeld::head_ref head = x.by_hand.head(0);
  const kvmeld::head_state state = make_head_state(p, head);
  CHECK_NOTHROW(check_compress(p, head, state, {slots}, true));
  CHECK_NOTHROW(check_compress(p, head, state, {tokens}, false));
  CHECK_THROWS_WITH(check_compress(p, head, state, {slots}, false),
                    Contains("h2o: expected reference queries or observed attention"));
  CHECK_THROWS_WITH(check_compress(p, head, state, {tokens + 2}, true), Contains("capacity"));
  CHECK_THROWS_WITH(check_compress(kvmeld::tova{}, head, state, {slots}, true), Contains("tova"));
}

TEST_CASE("kvzip: a second reading is taken away again before the prompt ends") {
  for (const auto& b : {budget{.slots = 20}, budget::shared(20)}) {
    two_caches x;
    kvmeld::compressor meld(x.theirs, kvmeld::kvzip{}, b);
    const index_t prompt = 40, again = 45;
    for (index_t l = 0; l < layers; ++l) {
      for (const index_t count : {prompt, again}) {
        meld.prompt(x.theirs.heads(l, 0), x.append(l, count));
      }
    }
    for (index_t h = 0; h < x.theirs.heads(); ++h) {
      x.theirs.head(h).restore(prompt, prompt);
    }
    meld.end_prompt(0);
    index_t held = 0;
    for (index_t h = 0; h < x.theirs.heads(); ++h) {
      const auto head = x.theirs.head(h);
      held += head.length();
      CHECK((head.next_position() == prompt && meld.state(h).length() == head.length()));
    }
    CHECK(
        (b.is_shared ? held > 0 && held <= 20 * x.theirs.heads() : held == 20 * x.theirs.heads()));
  }
}

TEST_CASE("kvzip+: a compressor scores by the norms that come with the queries") {
  two_caches x;
  const index_t dim = 16, rows = 5;
  const auto output = normal(rows * 2 * dim);
  const kvmeld::kvzip p{.plus = true, .output = {output.data(), rows, 2 * dim}};
  kvmeld::compressor meld(x.theirs, p, budget{.slots = 20});
  std::vector<float> norms(40);
  std::ranges::generate(norms, [n = 0.5F]() mutable { return n += 0.25F; });
  const kvmeld::queries asked = x.append(0, 40);
  CHECK_THROWS_WITH(meld.prompt(x.theirs.heads(0, 0), asked),
                    Catch::Contains("kvzip: plus=1: expected the queries' hidden_norm, got none"));
  meld.prompt(x.theirs.heads(0, 0), asked.with_hidden_norm(norms));
  for (index_t h = 0; h < 2; ++h) {
    auto state = kvmeld::make_head_state(p, x.by_hand.head(h));
    kvmeld::query_view<float> own{
        .data = x.q.data() + h * 2 * dim, .count = 40, .group = dim, .row = 4 * dim};
    own.hidden_norm = norms.data();
    kvmeld::observe(p, x.by_hand.head(h), state, own);
    expect_same(x.theirs.head(h), meld.state(h), x.by_hand.head(h), state);
  }
}

TEST_CASE("observe_prompt refuses what observe does, whatever the policy takes of a prompt") {
  two_caches x;
  (void)x.append(0, 5);
  const auto head = x.by_hand.head(0);
  for (const auto& p : {any_policy(kvmeld::attention_matching{}), any_policy(kvmeld::fold{}),
                        any_policy(kvmeld::h2o{})}) {
    CAPTURE(p.name());
    auto state = kvmeld::make_head_state(p, head);
    kvmeld::held_queries held;
    const auto refuses = [&](const kvmeld::query_view<float>& q, const char* why) {
      CHECK_THROWS_WITH(kvmeld::observe_prompt(p, head, state, held, q), Catch::Contains(why));
      CHECK((state.length() == 0 && !held.begun()));
    };
    refuses({.data = nullptr, .count = 3, .group = 16, .row = 64}, "got null");
    refuses({.data = x.q.data(), .count = -1, .group = 16, .row = 64}, "at least 0 queries");
  }
}

}  // namespace prompt_by_hand_test
