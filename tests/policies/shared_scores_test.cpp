// SPDX-License-Identifier: MIT
// What heads share slots by is in one unit for all of them: a share of attention.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace shared_scores_test {

using kvmeld::index_t;
constexpr index_t tokens = 96, dim = 8;

/// A prompt's rows of one KV head, one query head.
struct prompt {
  std::vector<float> q = fixtures::normal(tokens * dim), k = fixtures::normal(tokens * dim),
                     v = fixtures::normal(tokens * dim);
};

/// What `p` has heads share slots by, of a head with `group` query heads that are all alike.
template <class P>
std::vector<float> shared_scores(const P& p, const prompt& x, index_t group = 1) {
  const kvmeld::attention_spec spec{.kv_heads = 1, .group = group, .key_dim = dim};
  kvmeld::cache kv(spec, {.capacity = tokens + 1});
  kv.append(kv.heads(0, 0), x.k, x.v, tokens);
  const kvmeld::head_ref head = kv.head(0);
  auto state = kvmeld::make_head_state(p, head);
  kvmeld::observe(p, head, state, kvmeld::query_view<float>{x.q.data(), tokens, 0, 0, dim}.of(0));
  std::vector<float> out(tokens);
  kvmeld::declared(p).shared_scores(head, state, out);
  return out;
}

/// The policies that share slots by attention alone: kvmerger's unit is a cosine, fold's scores
/// have the keys' leverage in them.
std::vector<fixtures::example> sharing_attention() {
  auto all = fixtures::every_policy();
  std::erase_if(all, [](const auto& e) {
    return !kvmeld::declared(e.policy).shares() || e.name == "kvmerger" ||
           e.name.starts_with("fold");
  });
  for (auto& e : all) {
    e.policy = kvmeld::for_shared(e.policy, 40);
  }
  return all;
}

void expect_near(const std::vector<float>& a, const std::vector<float>& b) {
  for (std::size_t s = 0; s < a.size(); ++s) {
    CAPTURE(s);
    CHECK(a[s] == Approx(b[s]).epsilon(1e-3).margin(1e-5));
  }
}

TEST_CASE("shared scores: shares of attention, for every policy that gives them") {
  const prompt x;
  for (const auto& e : sharing_attention()) {
    CAPTURE(e.name);
    const auto of_slots = shared_scores(e.policy, x);
    CHECK(std::ranges::all_of(of_slots, [](float s) { return s >= 0 && s <= 1.0001F; }));
    CHECK(std::ranges::any_of(of_slots, [](float s) { return s > 0.01F; }));
  }
}

TEST_CASE("shared scores: logits that attention does not see change nothing") {
  const prompt x;
  prompt shifted = x;  // every query gives all keys the same more
  for (std::size_t i = 0; i < shifted.k.size(); i += dim) {
    shifted.k[i] += 5;
  }
  for (const auto& e : sharing_attention()) {
    CAPTURE(e.name);
    expect_near(shared_scores(e.policy, shifted), shared_scores(e.policy, x));
  }
}

TEST_CASE("shared scores: heads of more query heads have no larger ones") {
  const prompt x;
  for (const auto& e : sharing_attention()) {
    CAPTURE(e.name);
    expect_near(shared_scores(e.policy, x, 4), shared_scores(e.policy, x));
  }
}

TEST_CASE("shared scores: a head whose attention is spread gets more slots than one whose is not") {
  constexpr index_t slots = 32;
  kvmeld::attention_spec spec{.kv_heads = 2, .key_dim = dim};
  prompt x;
  std::vector<float> q(2 * x.q.size()), k(q), v = fixtures::normal(2 * tokens * dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < dim; ++d) {
      q[2 * t * dim + d] = 0.01F * x.q[t * dim + d];
      k[2 * t * dim + d] = x.k[t * dim + d];
      q[(2 * t + 1) * dim + d] = d == 0 ? 4.0F : 0.0F;
      k[(2 * t + 1) * dim + d] = t == 8 && d == 0 ? 40.0F : 0.0F;
    }
  }
  for (const char* name : {"h2o", "scissorhands", "keepkv", "zsmerge", "d2o", "roco"}) {
    CAPTURE(name);
    kvmeld::cache kv(spec, {.capacity = tokens + 1});
    kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                            kvmeld::budget::shared(slots));
    kv.append(kv.heads(0, 0), k, v, tokens);
    meld.prompt(kv.heads(0, 0), kvmeld::queries(q, tokens, spec));
    meld.end_prompt(0);
    CHECK(kv.head(0).length() > kv.head(1).length());
  }
}

TEST_CASE("shared scores: a policy without is refused by name") {
  for (const char* name : {"streaming_llm", "cam", "dropkv", "r_kv", "dropkv+massfold"}) {
    const auto p = kvmeld::make_policy<kvmeld::any_policy_or_peer>(name);
    CHECK_FALSE(kvmeld::declared(p).shares());
    CHECK_THROWS_WITH(kvmeld::for_shared(p, 40), Catch::Contains(std::string(name) + ": expected"));
  }
}

}  // namespace shared_scores_test
