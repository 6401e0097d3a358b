// SPDX-License-Identifier: MIT
// What compress, step and observe of a head refuse, whatever the policy: nothing has changed after
// it.
#include <catch2/catch.hpp>

#include "support/policies.hpp"
#include "support/refusals.hpp"

namespace entry_errors_test {

using fixtures::bad_floats;
using fixtures::cache;
using fixtures::decode;
using fixtures::first_ones;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::index_t;
using kvmeld::merge_plan;

constexpr index_t most = std::numeric_limits<index_t>::max();

/// Through any_policy: one instance of each call for all of them, which compiles in a fifth of the
/// time.
template <class F>
void with_evicting_policies(F f) {
  for (const any_policy& p :
       {any_policy(kvmeld::streaming_llm{}), any_policy(kvmeld::h2o{}),
        any_policy(kvmeld::snapkv{.window = 4}), any_policy(kvmeld::zsmerge{.residual = 2})}) {
    f(p);
  }
  f(first_ones{});
}
template <class F>
void with_all_policies(F f) {
  with_evicting_policies(f), f(any_policy(kvmeld::full_cache{}));
}

std::string name_of(const auto& p) { return std::string(p.name()); }

TEST_CASE("budgets that do not fit are refused by every policy", "[errors]") {
  with_evicting_policies([](auto p) {
    decode d(p);
    d.refuses_budget(name_of(p) + ": expected a budget of at least 1 slot, got 0", budget{0});
    d.refuses_budget("at least 1 slot, got -7", budget{-7});
    const index_t least = kvmeld::declared(p).min_budget();
    if (least > 1) {
      d.refuses_budget("a budget of at least " + std::to_string(least), budget{least - 1});
      d.refuses_budget("got " + std::to_string(least - 1), budget{least - 1});
    }
    d.refuses_budget("expected a capacity of at least 25 slots (the budget), got 24", budget{25});
    d.refuses_budget("got 24", budget{most});
    d.refuses_budget("expected a trigger above 12 slots (the target), got 12", budget{12, 12});
    d.refuses_budget("got -3", budget{12, -3});
    d.refuses("expected a capacity of at least 25 slots (budget and new token), got 24",
              [&] { d.step_with(budget{24}); });
    d.refuses("at least 40 slots", [&] { d.step_with(budget{12, 40}); });
  });
}

TEST_CASE("a step without room is refused by every policy", "[errors]") {
  with_all_policies([](auto p) {
    decode d(p);
    d.append(2, 4);  // the last head's slots are all in use
    d.refuses(name_of(p) + ": expected a free slot for the token, got all 24 slots in use",
              [&] { check_step(p, d.kv.head(2), budget{12}); });
  });
}

TEST_CASE("compress refuses missing and broken queries", "[errors]") {
  const auto refused = [](const any_policy& p) {
    decode d(p);
    const auto call = [&](const kvmeld::query_view<float>& queries) {
      return [&d, queries] {
        compress(d.policy, d.kv.head(0), d.state[0], d.state.workspace(), budget{12}, queries);
      };
    };
    auto null = d.queries;
    null.data = nullptr;
    d.refuses("compress: expected finite queries, got null", call(null));
    const std::size_t last = d.data.size() - d.q.size() + d.group * d.dim - 1;  // of head 0
    for (const std::size_t i : {std::size_t{0}, last}) {
      for (const float bad : bad_floats) {
        const float was = std::exchange(d.data[i], bad);
        d.refuses("compress: expected finite queries, got ", call(d.queries));
        d.data[i] = was;
      }
    }
    d.state = fixtures::make_state(p, d.kv);  // nothing observed
    d.refuses(name_of(p) + ": expected reference queries", call(kvmeld::no_queries));
  };
  refused(kvmeld::h2o{}), refused(kvmeld::snapkv{.window = 4}), refused(kvmeld::zsmerge{});
}

TEST_CASE("no policy goes on with another's state, however alike they are laid out", "[errors]") {
  std::vector<any_policy> all;
  for (const auto& example : fixtures::every_policy()) {
    all.push_back(example.policy);
  }
  for (const any_policy& p : all) {
    for (const any_policy& other : all) {
      if (p.name() == other.name()) {
        continue;
      }
      decode d(p);
      d.state = fixtures::make_state(other, d.kv);
      const std::string message =
          name_of(p) + ": expected a state for " + name_of(p) + ", got one for " + name_of(other);
      const std::vector<float> a(2 * 14, 0.1F);
      const auto head = d.kv.head(0);
      const auto call = [&](const auto& f) { d.refuses(message, f); };
      call([&] { compress(p, head, d.state[0], d.state.workspace(), budget{24}, d.queries); });
      call([&] { observe(p, head, d.state[0], d.queries); });
      call([&] { observe(p, head, d.state[0], d.state.workspace(), {.probabilities = a}); });
      auto own = fixtures::make_state(p, d.kv);
      d.refuses("copy: expected a state for " + name_of(p) + ", got one for " + name_of(other),
                [&] { copy(head, d.state[0], d.kv.head(1), own[1]); });
    }
  }
  decode d(any_policy(kvmeld::h2o{}));
  d.state[0] = kvmeld::head_state(kvmeld::declared(d.policy).slot_stats(), 0, d.capacity);
  d.refuses("h2o: expected a state for h2o, got one for no policy",
            [&] { d.compress_with(budget{12}); });
  d.state =
      fixtures::make_state(any_policy(kvmeld::tova{}), d.kv);  // to go on with another is to say so
  CHECK_NOTHROW(
      step(any_policy(kvmeld::tova{}), d.kv, d.state, {d.q, d.k, d.v}, budget{23}, d.out));
}

TEST_CASE("parameters out of range are refused, and so is protecting more than there can be",
          "[errors]") {
  const auto refused = [](const std::string& message, auto bad) {
    decode d(any_policy(decltype(bad){}));
    d.policy = any_policy(bad);
    d.refuses_budget(name_of(bad) + ": ", budget{12});
    d.refuses_budget(message, budget{12});
  };
  using kvmeld::h2o, kvmeld::snapkv, kvmeld::streaming_llm, kvmeld::zsmerge;
  refused("sinks in [0, 16777216], got -1", streaming_llm{.sinks = -1});
  refused("sinks in [0, 16777216], got -1", h2o{.sinks = -1});
  refused("sinks in [0, 16777216], got -1", zsmerge{.sinks = -1});
  for (const float share : {-0.1F, 1.0F, bad_floats[0], bad_floats[1]}) {
    refused("", h2o{.recent = share});
    refused("", zsmerge{.proximity = share});
  }
  refused("window in [1, 16777216], got 0", snapkv{.window = 0});
  refused("expected an odd kernel, got 4", snapkv{.window = 4, .kernel = 4});
  refused("expected kernel in [1, 16777216], got -1", snapkv{.window = 4, .kernel = -1});
  refused("expected alpha in [0, inf), got -1", zsmerge{.alpha = -1});
  refused("expected decay in (0, 1], got 0", zsmerge{.decay = 0});
  refused("expected decay in (0, 1], got 1.5", zsmerge{.decay = 1.5F});
  for (const index_t many : {13, most - 1, most}) {
    refused("", streaming_llm{.sinks = many}), refused("", h2o{.sinks = many});
    refused("", snapkv{.window = many}), refused("", zsmerge{.residual = many});
    refused("", snapkv{.sinks = many}), refused("", zsmerge{.sinks = many});
  }
}

TEST_CASE("a head is neither planned without its numbers nor measured on null", "[errors]") {
  decode d(kvmeld::h2o{});
  const auto head = d.kv.head(0);
  const kvmeld::query_view<float> null{nullptr, 4};
  d.refuses("expected finite queries, got null",
            [&] { observe(d.policy, head, d.state[0], null); });
  d.state = fixtures::make_state(d.policy, d.kv);
  kvmeld::slot_scratch scratch;
  merge_plan out;
  d.refuses("plan: expected a state of 14 slots (extend it), got 0",
            [&] { plan(d.policy, head, d.state[0], 12, scratch, out); });
  d.state[0].extend(14);
  d.refuses("h2o: expected reference queries",
            [&] { compress(d.policy, head, d.state[0], d.state.workspace(), budget{12}); });
}

TEST_CASE("probabilities of the wrong size are refused", "[errors]") {
  decode d(kvmeld::h2o{});
  const std::vector<float> a(2 * 14 + 1);
  for (const std::size_t n : {0U, 14U, 29U}) {
    d.refuses("observe: expected probabilities [2, 14], got " + std::to_string(n) + " floats", [&] {
      observe(d.policy, d.kv.head(0), d.state[0], d.state.workspace(),
              {.probabilities = std::span(a).first(n)});
    });
  }
}

}  // namespace entry_errors_test
