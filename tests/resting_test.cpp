// SPDX-License-Identifier: MIT
// What is held of a head whose next plan is far: no more than that plan will read, and it plans on
// what a state would plan on that observed just the steps before it.
#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/make_policy.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace resting_test {

using namespace small_model;
using kvmeld::as_size;
using kvmeld::budget;
using kvmeld::declared;
using kvmeld::head_state;
using any = kvmeld::any_policy_or_peer;
using meld = kvmeld::compressor<any>;

constexpr index_t prompt = 60, slots = 48, room = 20, capacity = 96;
constexpr budget far{.slots = slots, .trigger = slots + room + 1};

/// Policies whose states come to rest with so much room, but for those that observe all.
std::vector<fixtures::example> resting() {
  kvmeld::fold by_leverage, by_scores;
  by_leverage.decode.queries = by_scores.decode.queries = 3;
  by_leverage.decode.stride = by_scores.decode.stride = 4;
  by_scores.pins = kvmeld::fold::pin_rule::scores;
  const kvmeld::snapkv snapkv{.window = 6};
  return {{"fold", by_leverage},
          {"fold by scores", by_scores},
          {"snapkv", snapkv},
          {"tova", kvmeld::tova()},
          {"snapkv+massfold", kvmeld::make_policy<any>("snapkv+massfold:window=6")},
          {"kvzip", kvmeld::kvzip()}};
}

std::vector<fixtures::example> resting_in_decode() {
  auto all = resting();
  std::erase_if(all, [](const auto& e) { return !declared(e.policy).supports_decode(); });
  return all;
}

/// Rows of one step of a request, `[layers]`.
struct step_rows {
  std::vector<std::vector<float>> q, k, v;

  step_rows() {
    for (index_t l = 0; l < layers_of; ++l) {
      q.push_back(normal(kv_heads_of * group * dim));
      k.push_back(normal(kv_heads_of * dim)), v.push_back(normal(kv_heads_of * dim));
    }
  }
  kvmeld::step_input in(index_t l) const { return {q[as_size(l)], k[as_size(l)], v[as_size(l)]}; }
  std::vector<float> through(meld& m, index_t request = 0) const {
    std::vector<float> all, out(as_size(kv_heads_of, group, dim));
    for (index_t l = 0; l < layers_of; ++l) {
      m.step(model_cache::of(l, request), in(l), out);
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
};

std::vector<index_t> heads_of(index_t request) {
  std::vector<index_t> all;
  for (index_t l = 0; l < layers_of; ++l) {
    for (index_t i = 0; i < kv_heads_of; ++i) {
      all.push_back(model_cache::of(l, request).first + i);
    }
  }
  return all;
}

/// What rest leaves of a state, in a state that has just begun.
head_state left(const any& p, const kvmeld::head_ref& head, head_state of) {
  of.extend(of.length());
  const kvmeld::decode_use use = declared(p).decode_use();
  head_state fresh = kvmeld::make_head_state(p, head);
  fresh.extend(use.columns ? of.length() : 0);
  for (index_t c = 0; c < of.slot_stats(); ++c) {
    std::ranges::transform(
        of.column(c).first(as_size(fresh.length())), fresh.column(c).begin(), [](float x) {
          return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xFFFF0000U);
        });
  }
  std::ranges::copy(of.memory().first(use.memory), fresh.memory().begin());
  fresh.count_queries(of.observed());
  return fresh;
}

/// A request after its prompt: through a compressor with room, and its states as they were without.
struct ended {
  model_cache kv{capacity}, near_kv{capacity};
  meld with_room, without;

  explicit ended(const any& p)
      : with_room(kv, p, declared(p).supports_decode() ? far : budget{.slots = slots}),
        without(near_kv, p, budget{.slots = slots}) {
    const prompt_rows rows(prompt);
    read(with_room, kv, rows, 0, prompt), with_room.end_prompt(0);
    read(without, near_kv, rows, 0, prompt), without.end_prompt(0);
  }
};

TEST_CASE("no state is held of a request without tokens", "[resting]") {
  for (const auto& example : resting()) {
    CAPTURE(example.name);
    ended e(example.policy);
    e.with_room.clear(0);
    CHECK(e.with_room.bytes() == 0);
  }
}

TEST_CASE("a state at rest is as its policy says, and nothing of it is held beyond that",
          "[resting]") {
  for (const auto& example : resting()) {
    CAPTURE(example.name);
    const auto use = declared(example.policy).decode_use();
    ended e(example.policy);
    for (const index_t h : heads_of(0)) {
      const head_state& rests = e.with_room.state(h);
      CHECK(rests.rests());
      CHECK(rests.bytes() ==
            4 * use.memory + (use.columns ? as_size(2 * slots, rests.slot_stats()) : 0));
      CHECK((rests.memory().empty() && rests.memory_size() == e.without.state(h).memory_size()));
      CHECK((rests.slot_stats() == 0 || rests.column(0).empty()));
      head_state awake = rests;
      CHECK((awake.rests() && awake.bytes() == rests.bytes()));
      awake.extend(awake.length());
      CHECK(same_state(awake, left(example.policy, e.kv.head(h), e.without.state(h))));
      CHECK(awake.length() == (use.columns ? slots : 0));
    }
  }
}

TEST_CASE("a state that rests plans as one that observed the steps before a plan alone",
          "[resting]") {
  for (const auto& example : resting_in_decode()) {
    const any& p = example.policy;
    CAPTURE(example.name);
    const kvmeld::decode_use use = declared(p).decode_use();
    ended e(p);
    const auto heads = heads_of(0);
    std::vector<head_state> states;
    kvmeld::workspace work;
    states.reserve(heads.size());
    for (const index_t h : heads) {
      states.push_back(left(p, e.kv.head(h), e.without.state(h)));
    }
    index_t plans = 0;
    for (index_t t = 0; t < 3 * room; ++t) {
      CAPTURE(t);
      const step_rows rows;
      const std::vector<float> got = rows.through(e.with_room);
      std::vector<float> wanted;
      for (std::size_t i = 0; i < heads.size(); ++i) {
        const auto at = as_size(index_t(i) % kv_heads_of), l = i / as_size(kv_heads_of);
        const kvmeld::head_ref head = e.near_kv.head(heads[i]);
        const float *const q = rows.q[l].data() + at * group * dim,
                           *const k = rows.k[l].data() + at * dim,
                           *const v = rows.v[l].data() + at * dim;
        std::vector<float> out(as_size(group, dim));
        const bool rests = head.length() + use.steps < far.trigger;
        if (rests) {
          head.push(k, v);
          kvmeld::attend(head, kvmeld::log_mass_of{head}, q, out.data(), {}, {});
        } else {
          REQUIRE(kvmeld::try_step(p, head, states[i], work, q, k, v, far, out.data()));
          if (head.length() == slots) {
            ++plans;
            states[i] = left(p, head, states[i]);
          }
        }
        wanted.insert(wanted.end(), out.begin(), out.end());
        CHECK(same_head(e.kv.head(heads[i]), head));
        CHECK((e.with_room.state(heads[i]).rests() == rests));
      }
      CHECK(got == wanted);
    }
    CHECK(plans == 8);
  }
}

TEST_CASE("a state at rest is copied, saved and loaded, and goes on bit for bit", "[resting]") {
  for (const auto& example : resting_in_decode()) {
    const any& p = example.policy;
    CAPTURE(example.name);
    ended e(p);
    for (int t = 0; t < 3; ++t) {
      (void)step_rows().through(e.with_room);
    }
    std::stringstream file, again;
    e.with_room.save(file, 0);
    CHECK(e.with_room.state(0).rests());
    model_cache loaded_kv(capacity), other_kv(capacity + 7);
    meld loaded(loaded_kv, p, far), other(other_kv, p, far);
    loaded.load(file, 1);
    loaded.save(again, 1);
    CHECK(again.str() == file.str());
    e.with_room.copy(0, 1);
    other.copy(e.with_room, 0, 0);
    CHECK(loaded.state(heads_of(1)[0]).bytes() == e.with_room.state(0).bytes());
    CHECK(other.state(0).bytes() == e.with_room.state(0).bytes());
    for (index_t t = 0; t < 2 * room; ++t) {
      for (const index_t h : heads_of(1)) {  // given back as it is, whenever that is
        CHECK_NOTHROW(e.with_room.set_state(h, e.with_room.state(h)));
      }
      const step_rows rows;
      const auto wanted = rows.through(e.with_room);
      CHECK(rows.through(e.with_room, 1) == wanted);
      CHECK(rows.through(loaded, 1) == wanted);
      CHECK(rows.through(other) == wanted);
    }
    for (std::size_t i = 0; i < heads_of(0).size(); ++i) {
      const auto head = e.kv.head(heads_of(0)[i]);
      CHECK(same_head(head, e.kv.head(heads_of(1)[i])));
      CHECK(same_head(head, loaded_kv.head(heads_of(1)[i])));
      CHECK(same_head(head, other_kv.head(heads_of(0)[i])));
    }
  }
}

TEST_CASE("drafts over the step that wakes a state count as steps would, or were never there",
          "[resting]") {
  constexpr index_t drafted = 6;
  for (const auto& example : resting_in_decode()) {
    const any& p = example.policy;
    CAPTURE(example.name);
    ended e(p);
    model_cache plain_kv(capacity);
    meld plain(plain_kv, p, far);
    plain.copy(e.with_room, 0, 0);
    for (index_t round = 0; round < 10; ++round) {
      const index_t accepted = 2 * (round % 4);  // 0 to all
      std::vector<step_rows> steps(drafted);
      for (index_t l = 0; l < layers_of; ++l) {
        std::vector<float> q, k, v;
        for (const step_rows& s : steps) {
          const auto add = [&](std::vector<float>& to,
                               const std::vector<std::vector<float>>& from) {
            to.insert(to.end(), from[as_size(l)].begin(), from[as_size(l)].end());
          };
          add(q, s.q), add(k, s.k), add(v, s.v);
        }
        std::vector<float> out(q.size());
        const std::size_t bytes = e.with_room.bytes();
        e.with_room.draft(model_cache::of(l, 0), {q, k, v}, out, drafted);
        CHECK(e.with_room.bytes() == bytes);
      }
      e.with_room.accept(0, accepted);
      for (index_t t = 0; t < accepted; ++t) {
        (void)steps[as_size(t)].through(plain);
      }
      for (const index_t h : heads_of(0)) {
        CHECK(same_head(e.kv.head(h), plain_kv.head(h)));
        CHECK(e.with_room.state(h).rests() == plain.state(h).rests());
        CHECK(same_state(e.with_room.state(h), plain.state(h)));
      }
    }
  }
}

TEST_CASE("another prompt is planned on what rest left of the last", "[resting]") {
  for (const auto& example : resting()) {
    CAPTURE(example.name);
    const any& p = example.policy;
    ended e(p);
    for (const index_t h : heads_of(0)) {
      head_state state = left(p, e.near_kv.head(h), e.without.state(h));
      state.extend(slots);
      e.without.set_state(h, state);
    }
    const prompt_rows rows(30);
    read(e.with_room, e.kv, rows, 0, 15), read(e.without, e.near_kv, rows, 0, 15);
    CHECK_FALSE(e.with_room.state(0).rests());
    e.with_room.end_prompt(0), e.without.end_prompt(0);
    for (const index_t h : heads_of(0)) {
      CHECK(same_head(e.kv.head(h), e.near_kv.head(h)));
      CHECK(e.with_room.state(h).rests());
    }
  }
}

TEST_CASE("an engine's own attention is observed from the step on that a plan needs", "[resting]") {
  for (const auto& example : resting_in_decode()) {
    const any& p = example.policy;
    CAPTURE(example.name);
    ended e(p);
    model_cache own_kv(capacity);
    meld own(own_kv, p, far);
    own.copy(e.with_room, 0, 0);
    for (index_t t = 0; t < 2 * room; ++t) {
      const step_rows rows;
      (void)rows.through(e.with_room);
      for (index_t l = 0; l < layers_of; ++l) {
        const kvmeld::head_range heads = model_cache::of(l, 0);
        std::vector<float> probabilities, log_sum_exp(as_size(kv_heads_of, group)),
            out(as_size(group, dim));
        own_kv.append(heads, rows.k[as_size(l)], rows.v[as_size(l)], 1);
        for (index_t i = 0; i < kv_heads_of; ++i) {
          const kvmeld::head_ref head = own_kv.head(heads.first + i);
          std::vector<float> of_head(as_size(group, head.length()));
          kvmeld::attend(head, kvmeld::log_mass_of{head},
                         rows.q[as_size(l)].data() + as_size(i * group, dim), out.data(), of_head,
                         std::span(log_sum_exp).subspan(as_size(i * group), group));
          probabilities.insert(probabilities.end(), of_head.begin(), of_head.end());
        }
        own.observe(heads, {.probabilities = probabilities,
                            .log_sum_exp = log_sum_exp,
                            .query = rows.q[as_size(l)]});
        own.compress(heads);
      }
      for (const index_t h : heads_of(0)) {
        REQUIRE(same_head(e.kv.head(h), own_kv.head(h)));
      }
    }
  }
}

TEST_CASE("a head whose state rests gathers tokens that are pinned", "[resting][pins]") {
  for (const auto& example : resting_in_decode()) {
    const any& p = example.policy;
    CAPTURE(example.name);
    ended e(p);
    model_cache plain_kv(capacity);
    meld plain(plain_kv, p, far);
    plain.copy(e.with_room, 0, 0);
    e.with_room.pin(0, prompt + 1, 2);
    for (index_t t = 0; t < 2 * room; ++t) {
      const step_rows rows;
      const auto got = rows.through(e.with_room), wanted = rows.through(plain);
      for (std::size_t i = 0; i < got.size() && t < room - 3; ++i) {
        CHECK(got[i] == Approx(wanted[i]).margin(1e-5));  // in another order of slots
      }
    }
    for (const index_t h : heads_of(0)) {
      REQUIRE(e.with_room.pinned(h) == 2);
      CHECK(e.kv.head(h).position(0) == prompt + 1);
      CHECK(e.kv.head(h).position(1) == prompt + 2);
      CHECK(e.kv.head(h).length() < far.trigger);
    }
  }
}

TEST_CASE("a prompt's end is refused where the state rests and has no queries",
          "[resting][errors]") {
  ended e(kvmeld::snapkv{.window = 6});
  (void)step_rows().through(e.with_room);
  CHECK_THROWS_WITH(e.with_room.end_prompt(0), Catch::Contains("expected the prompt's queries"));
  while (e.kv.head(0).length() + 6 < far.trigger) {
    (void)step_rows().through(e.with_room);
  }
  (void)step_rows().through(e.with_room);
  CHECK_NOTHROW(e.with_room.end_prompt(0));
}

TEST_CASE("a state that rests is no state to plan on", "[resting][errors]") {
  const kvmeld::snapkv policy{.window = 6};
  ended far_away{policy};
  for (index_t t = 0; t < 8; ++t) {
    step_rows().through(far_away.with_room);
  }
  const index_t h = heads_of(0)[0];
  const head_state at_rest = far_away.with_room.state(h);
  REQUIRE(at_rest.rests());
  head_state same = at_rest;
  kvmeld::workspace work;
  CHECK_THROWS_WITH(kvmeld::compress(policy, far_away.kv.head(h), same, work, budget{20}),
                    Catch::Contains("expected reference queries or observed attention"));
  CHECK(same.rests());

  const kvmeld::fold by_leverage;
  ended folded{by_leverage};
  for (const index_t one : heads_of(0)) {  // it keeps its scores, and how many queries these are of
    const head_state kept = folded.with_room.state(one);
    model_cache near_kv(capacity);
    meld near(near_kv, by_leverage, budget{.slots = slots});
    head_state none({}, 0, capacity), its = none;
    kvmeld::copy(folded.kv.head(one), none, near_kv.head(one), its);
    if (kept.rests()) {
      CHECK_THROWS_WITH(near.set_state(one, kept),
                        Catch::Contains("set_state: expected a state that observed the steps"));
    }
  }
}

TEST_CASE("pins that are gathered at rest leave slots measured", "[resting][pins]") {
  for (const auto& example : resting_in_decode()) {
    CAPTURE(example.name);
    ended of{example.policy};
    const index_t next = of.kv.head(heads_of(0)[0]).next_position();
    of.with_room.pin(0, next + 2, 2);
    for (index_t t = 0; t < 4; ++t) {
      step_rows().through(of.with_room);
    }
    const prompt_rows rows(4), more(9);
    for (index_t l = 0; l < layers_of; ++l) {
      const auto heads = model_cache::of(l, 0);
      of.kv.append(heads, rows.k[as_size(l)], rows.v[as_size(l)], 4);
      CHECK_THROWS_WITH(
          of.with_room.prompt(heads, kvmeld::queries(more.q[as_size(l)], 9, of.kv.spec())),
          Catch::Contains("at most 4"));
    }
  }
}

}  // namespace resting_test
