// SPDX-License-Identifier: MIT
// A policy that throws, in any of its members and at any time: heads, states and what a compressor
// knows of them agree afterwards.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/fixtures.hpp"

namespace throwing_policy_test {

using kvmeld::budget;
using kvmeld::index_t;

constexpr index_t group = 2, dim = 6, tokens = 20;

/// Throws at the `fails_at`-th call of any of its members.
struct fragile {
  static inline int calls = 0, fails_at = 0;

  static void touch() {
    if (++calls == fails_at) {
      throw std::runtime_error("a member's own");
    }
  }
  static constexpr std::string_view name() { return "fragile"; }
  static constexpr std::array<kvmeld::slot_stat, 1> slot_stats() {
    return {kvmeld::slot_stat{kvmeld::slot_reduce::sum, 1}};
  }
  static constexpr kvmeld::observation_needs needs() { return {.probabilities = true}; }
  void observe(const kvmeld::kv_head auto&, kvmeld::head_state&, const kvmeld::observation&) const {
    touch();
  }
  template <class T>
  void observe(const kvmeld::kv_head auto&, kvmeld::head_state&,
               const kvmeld::query_view<T>&) const {
    touch();
  }
  void plan(const kvmeld::kv_head auto& head, const kvmeld::head_state&, index_t target,
            kvmeld::slot_scratch&, kvmeld::merge_plan& out) const {
    touch();
    out.reset(head.length());
    for (index_t s = head.length() - target; s < head.length(); ++s) {
      out.keep(s, head.log_mass(s));
    }
  }
  void update_memory(const kvmeld::kv_head auto&, kvmeld::head_state&, const kvmeld::merge_plan&,
                     kvmeld::slot_scratch&) const {
    touch();
  }
  void after_compress(const kvmeld::kv_head auto&, kvmeld::head_state&, index_t) const { touch(); }
  auto mass(const kvmeld::kv_head auto& head, const kvmeld::head_state&) const {
    touch();
    return kvmeld::log_mass_of{head};
  }
};

/// A request of two heads from its prompt to a saved file, by a policy that throws once: a call
/// that threw is made again where it has changed nothing, and left where its tokens are in.
struct fragile_request {
  static constexpr index_t n = 2, slots = 12;

  fixtures::cache<float> kv = fixtures::random_cache(tokens, dim, group, 64, n);
  kvmeld::compressor<fragile> meld;
  int thrown = 0;

  explicit fragile_request(const budget& b) : meld(kv, fragile{}, b) {}

  /// Did it throw?
  bool throws(const std::function<void()>& call) {
    try {
      call();
      return false;
    } catch (const std::runtime_error& e) {
      CHECK(std::string(e.what()) == "a member's own");
      ++thrown;
      return true;
    }
  }
  std::vector<std::vector<float>> rows() {
    return {fixtures::bytes_of(kv.head(0)), fixtures::bytes_of(kv.head(1))};
  }
  void run() {
    const auto all = kv.heads(0, 0);
    const auto q = fixtures::normal(tokens * n * group * dim), k = fixtures::normal(3 * n * dim);
    const std::span<const float> one_q = std::span(q).first(n * group * dim),
                                 one_k = std::span(k).first(n * dim),
                                 three_q = std::span(q).first(3 * n * group * dim);
    std::vector<float> out(3 * n * group * dim);
    const std::span<float> one_out = std::span(out).first(n * group * dim);
    const auto again = [&](const std::function<void()>& call) {
      if (throws(call)) {
        call();
      }
    };
    const auto steps = [&](int count) {
      for (int t = 0; t < count; ++t) {
        throws([&] { meld.step(all, {one_q, one_k, one_k}, one_out); });
      }
    };
    again([&] { meld.prompt(all, kvmeld::queries(q, tokens, kv.spec())); });
    again([&] { meld.end_prompt(0); });
    CHECK((kv.head(0).length() == slots && kv.head(1).length() == slots));
    steps(5);
    const auto before = rows();
    if (throws([&] { meld.draft(all, {three_q, k, k}, out, 3); })) {
      CHECK(rows() == before);
      CHECK((meld.state(0).length() == kv.head(0).length()));
      meld.draft(all, {three_q, k, k}, out, 3);
    }
    const index_t seen = kv.head(0).next_position();
    throws([&] { meld.accept(0, 2); });
    CHECK(kv.head(0).next_position() <= seen + 2);
    for (int t = 0; t < 4; ++t) {  // an engine's own attention
      kv.kvmeld::cache::append(all, one_k, one_k, 1);
      const index_t longest = std::max(kv.head(0).length(), kv.head(1).length());
      const std::vector<float> p(static_cast<std::size_t>(n * group * longest), 0.1F);
      again([&] { meld.observe(all, {.probabilities = p}); });
      again([&] { meld.compress(all); });
    }
    steps(3);
    std::stringstream file;
    meld.save(file, 0), meld.load(file, 0);
    steps(3);
    for (index_t h = 0; h < n; ++h) {
      CHECK(kv.head(h).length() <= meld.limit(h).trigger_length());
      CHECK(meld.state(h).length() == kv.head(h).length());
    }
  }
};

TEST_CASE("whatever a policy throws, its head goes on as its lengths say", "[errors]") {
  const auto b = GENERATE(budget{fragile_request::slots}, budget{fragile_request::slots, 14});
  fragile::calls = fragile::fails_at = 0;
  fragile_request(b).run();
  const int all = fragile::calls;
  CHECK(all > 100);
  for (int at = 1; at <= all; ++at) {
    CAPTURE(at);
    fragile::calls = 0, fragile::fails_at = at;
    fragile_request request(b);
    CHECK_NOTHROW(request.run());
    CHECK(request.thrown == 1);
  }
}

TEST_CASE("what a policy throws after its plan was carried out has ended the prompt", "[errors]") {
  fragile::calls = fragile::fails_at = 0;
  fragile_request r{budget{fragile_request::slots}};
  const auto q = fixtures::normal(tokens * 2 * group * dim), k = fixtures::normal(2 * dim);
  std::vector<float> out(2 * group * dim);
  r.meld.prompt(r.kv.heads(0, 0), kvmeld::queries(q, tokens, r.kv.spec()));
  fragile::calls = 0, fragile::fails_at = 3;  // plan, memory, after_compress
  CHECK_THROWS_WITH(r.meld.end_prompt(0), "a member's own");
  CHECK((r.kv.head(0).length() == 12 && r.kv.head(1).length() == tokens));
  const kvmeld::head_range first{0, 1};
  r.meld.step(first,
              {std::span(q).first(group * dim), std::span(k).first(dim), std::span(k).first(dim)},
              std::span(out).first(group * dim));
  CHECK((r.kv.head(0).length() == 12 && r.kv.head(0).next_position() == tokens + 1));
  CHECK_THROWS_WITH(r.meld.step(r.kv.heads(0, 0), {std::span(q).first(out.size()), k, k}, out),
                    Catch::Contains("end_prompt first"));
}

TEST_CASE("a spoiled log-mass is refused by a step that plans with it, and the token is in",
          "[errors]") {
  const kvmeld::attention_spec spec{.kv_heads = 1, .group = group, .key_dim = dim};
  kvmeld::cache kv(spec, {.capacity = 40});
  const auto rows = fixtures::normal(tokens * dim), q = fixtures::normal(tokens * group * dim);
  kv.append(kv.heads(0, 0), rows, rows, tokens);
  kvmeld::compressor meld(kv, kvmeld::streaming_llm{}, budget{12, 14});
  meld.end_prompt(0);
  std::vector<float> out(group * dim);
  const auto step = [&] {
    meld.step(
        kv.heads(0, 0),
        {std::span(q).first(group * dim), std::span(rows).first(dim), std::span(rows).first(dim)},
        out);
  };
  float& mass = kv.head(0).log_mass(0);  // a sink's, which every plan keeps
  mass = -INFINITY;
  step();  // below its trigger: no plan
  try {
    step();
    FAIL("not refused");
  } catch (const kvmeld::error& e) {
    CHECK(e.code() == kvmeld::errc::not_finite);
    CHECK_THAT(e.what(), Catch::Contains("a finite log-mass, got -inf"));
  }
  CHECK((kv.head(0).length() == 14 && kv.head(0).next_position() == tokens + 2));
  mass = 0;
  step();
  CHECK((kv.head(0).length() == 12 && kv.head(0).next_position() == tokens + 3));
}

}  // namespace throwing_policy_test
