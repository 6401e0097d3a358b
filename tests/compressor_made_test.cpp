// SPDX-License-Identifier: MIT
// What is known when a compressor is made, and what a state was made with, is refused there.
#include <algorithm>  // std::ranges::equal
#include <catch2/catch.hpp>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/peers.hpp"
#include "support/random.hpp"

namespace compressor_made_test {

using kvmeld::budget, kvmeld::index_t;
using any = kvmeld::basic_any_policy<kvmeld::h2o, kvmeld::r_kv, kvmeld::keepkv>;
using floats = std::vector<float>;

inline constexpr index_t heads = 2, dim = 16;
const kvmeld::attention_spec spec{.kv_heads = heads, .group = 2, .key_dim = dim};

floats normal(index_t n) {
  std::normal_distribution<float> gauss;
  floats x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

TEST_CASE("a trigger that no head can reach is refused when a compressor is made", "[errors]") {
  kvmeld::cache kv(spec, {.capacity = 40});
  const auto make = [&](const budget& b) { kvmeld::compressor meld(kv, kvmeld::h2o{}, b); };
  CHECK_NOTHROW(make({.slots = 24, .trigger = 40}));
  for (const index_t trigger : {41, 100}) {
    CHECK_THROWS_WITH(make({.slots = 24, .trigger = trigger}),
                      Catch::Contains("compressor: expected a capacity of at least " +
                                      std::to_string(trigger) + " slots (the trigger), got 40"));
  }
}

TEST_CASE("what has no effect on a budget is refused when a compressor is made", "[errors]") {
  kvmeld::cache kv(spec, {.capacity = 64});
  const auto refused = [&](const budget& b, const std::string& message) {
    CHECK_THROWS_WITH(kvmeld::compressor(kv, kvmeld::h2o{}, b),
                      Catch::Contains("compressor: " + message));
  };
  refused({.slots = 24, .trigger = 30, .slack = 20},
          "expected a trigger or slack, got 30 and 20 slots");
  for (const budget& alone :
       {budget{.slots = 24, .most = 40}, budget{.slots = 24, .by_layer = true},
        budget{.slots = 24, .alike = true}}) {
    refused(alone, "expected a shared budget with a cap");
  }
  refused({.slots = 24, .is_shared = true, .alike = true}, "expected equal heads of a layer");
}

TEST_CASE("whatever the budget of a full cache, what is saved of it is loaded") {
  for (const budget& b : {budget{}, budget{.slots = 500}, budget{.slots = 500, .trigger = 600},
                          budget{.trigger = 9}, budget{.slots = 8, .slack = 200}}) {
    CAPTURE(b.slots, b.trigger, b.slack);
    kvmeld::cache kv(spec, {.requests = 2, .capacity = 64});
    kvmeld::compressor meld(kv, kvmeld::full_cache{}, b);
    kv.append(kv.heads(0, 0), normal(40 * heads * dim), normal(40 * heads * dim), 40);
    std::stringstream saved;
    meld.save(saved, 0);
    CHECK_NOTHROW(meld.load(saved, 1));
    CHECK(kv.head(kv.heads(0, 1)[0]).length() == 40);
  }
  kvmeld::cache kv(spec, {.capacity = 64});
  CHECK_THROWS_WITH(kvmeld::compressor(kv, kvmeld::full_cache{}, {.slots = -1}),
                    Catch::Contains("compressor: expected a budget of at least 0 slots, got -1"));
}

TEST_CASE("one kind of policy has a shared budget, with equal options", "[errors]") {
  kvmeld::cache kv(spec, {.capacity = 64});
  const auto make = [&](const std::vector<any>& policies, const budget& b) {
    const std::vector<budget> budgets{b};
    kvmeld::compressor<any> meld(kv, std::span<const any>(policies),
                                 std::span<const budget>(budgets));
  };
  const auto refused = Catch::Contains("one policy with equal options where heads share a budget");
  for (const budget& b : {budget::shared(32), budget::shared_by_layer(32)}) {
    CHECK_THROWS_WITH(make({kvmeld::h2o{}, kvmeld::keepkv{}}, b), refused);
    CHECK_THROWS_WITH(make({kvmeld::h2o{}, kvmeld::h2o{.recent = 0.25F}}, b), refused);
    CHECK_NOTHROW(make({kvmeld::h2o{}, kvmeld::h2o{}}, b));
  }
  CHECK_NOTHROW(make({kvmeld::h2o{}, kvmeld::keepkv{}}, {.slots = 32}));
}

TEST_CASE("what a policy needs is told before a compressor is made") {
  const auto h2o = kvmeld::needs_of(any(kvmeld::h2o{}));
  CHECK((h2o.queries && h2o.decodes && h2o.shares && h2o.attention.alibi));
  CHECK((h2o.step.probabilities && !h2o.step.query && !h2o.step.log_sum_exp));
  const auto kvzip = kvmeld::needs_of(kvmeld::kvzip{});
  CHECK((kvzip.queries && !kvzip.decodes && !kvzip.step.probabilities));
  kvmeld::cache kv(spec, {.capacity = 40});
  CHECK_NOTHROW(kvmeld::compressor(kv, kvmeld::kvzip{}, budget{.slots = 24}));  // for prompts
  for (const budget& decodes : {budget{.slots = 24, .trigger = 30}, budget{.slots = 24, .slack = 4},
                                budget::shared(24, 4)}) {
    CHECK_THROWS_WITH(kvmeld::compressor(kv, kvmeld::kvzip{}, decodes),
                      Catch::Contains("kvzip: expected a policy that decodes where a budget has a "
                                      "trigger or slack, got one for prompts only"));
  }
}

TEST_CASE("queries that see no slot change nothing") {
  kvmeld::cache kv(spec, {.capacity = 40});
  kv.append(kv.heads(0, 0), normal(3 * heads * dim), normal(3 * heads * dim), 3);
  const kvmeld::dropkv p{.window = 32};
  const floats q = normal(300 * 2 * dim);
  auto state = kvmeld::make_head_state(p, kv.head(0)), own = state;
  // The last three of 300 queries see tokens; the others lie before the first.
  kvmeld::observe(p, kv.head(0), state, kvmeld::prompt_queries(q.data(), 300, 1, 2, dim));
  kvmeld::observe(p, kv.head(0), own,
                  kvmeld::prompt_queries(q.data() + 297 * 2 * dim, 3, 1, 2, dim));
  for (std::size_t s = 0; s < 3; ++s) {  // blocks of other queries sum in another order
    CHECK(state.column(0)[s] == Approx(own.column(0)[s]).epsilon(1e-5));
  }
  CHECK(state.column(0)[2] > 0);
}

TEST_CASE("one memory for keys and values is refused for what it is", "[errors]") {
  floats rows(64 * heads * dim);
  auto turned = spec;
  turned.rope = kvmeld::rotary::halves(10'000);
  const auto make = [&] {
    kvmeld::strided_cache kv(turned, {.capacity = 64}, kvmeld::rows(rows, kvmeld::layout::nhd),
                             kvmeld::rows(rows, kvmeld::layout::nhd));
  };
  CHECK_THROWS_WITH(make(), Catch::Contains("where keys and values have one memory") &&
                                Catch::Contains("give them memory of their own"));
}

/// LAW: a state made with `from` is refused wherever `to` would go on with it, and is as it was.
template <class P>
void check_options(const P& from, const P& to) {
  kvmeld::cache kv(spec, {.capacity = 64});
  kv.append(kv.heads(0, 0), normal(32 * heads * dim), normal(32 * heads * dim), 32);
  const auto head = kv.head(0);
  const auto refused = [&](const std::function<void(kvmeld::head_state&)>& call) {
    auto state = kvmeld::make_head_state(from, head);
    CHECK_THROWS_WITH(call(state), Catch::Contains("expected a state of") &&
                                       Catch::Contains("made with other options"));
    CHECK((state.length() == 0 && state.observed() == 0 && head.length() == 32));
  };
  const floats q = normal(32 * 2 * dim), p(2 * 32, 1.0F / 32), lse(2), row = normal(dim);
  const auto asked = kvmeld::prompt_queries(q.data(), 32, 1, 2, dim);
  kvmeld::workspace work;
  kvmeld::held_queries held;
  refused([&](auto& state) { kvmeld::observe(to, head, state, asked); });
  refused([&](auto& state) {
    kvmeld::observe(to, head, state, work,
                    {.probabilities = p, .log_sum_exp = lse, .query = q.data()});
  });
  refused([&](auto& state) { kvmeld::observe_prompt(to, head, state, held, asked); });
  refused([&](auto& state) { kvmeld::compress(to, head, state, work, budget{24}, asked); });
  refused([&](auto& state) {
    floats out(2 * dim);
    kvmeld::step(to, head, state, work, q.data(), row.data(), row.data(), budget{40}, out.data());
  });
  kvmeld::compressor meld(kv, to, budget{.slots = 40});
  refused([&](auto& state) { meld.set_state(0, state); });
}

TEST_CASE("a state made with other options of the policy is refused by every function",
          "[errors]") {
  check_options(kvmeld::r_kv{.window = 2}, kvmeld::r_kv{.window = 16});
  check_options(kvmeld::r_kv{.window = 16}, kvmeld::r_kv{.window = 2});
  using kvmeld::keepkv;
  check_options(keepkv{.variant = keepkv::mode::code, .window = 4},
                keepkv{.variant = keepkv::mode::code, .window = 8});
  check_options<any>(kvmeld::r_kv{.window = 2}, kvmeld::r_kv{.window = 16});
}

}  // namespace compressor_made_test
