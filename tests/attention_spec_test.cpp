// SPDX-License-Identifier: MIT
// What a model computes in a layer: its defaults, and what no cache can be made for.
#include "kvmeld/memory/attention_spec.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "../examples/evaluate/reference_queries.hpp"
#include "kvmeld/peers.hpp"
#include "support/all_heads.hpp"

namespace attention_spec_test {

using Catch::Contains;
using kvmeld::attention_spec;
using kvmeld::rotary;

const attention_spec plain{.kv_heads = 2, .group = 3, .key_dim = 16};

/// The error of `plain` changed by `change`.
template <class Change>
void refuses(kvmeld::errc code, const std::string& message, Change change) {
  attention_spec spec = plain;
  change(spec);
  INFO(message);
  try {
    (void)spec.checked();
    FAIL("not refused");
  } catch (const kvmeld::error& e) {
    CHECK(e.code() == code);
    CHECK_THAT(e.what(), Contains("kvmeld: ") && Contains(message));
  }
}

TEST_CASE("attention_spec: defaults are filled in, what is given stays", "[attention_spec]") {
  const attention_spec filled = plain.checked();
  CHECK((filled.kv_heads == 2 && filled.group == 3 && filled.key_dim == 16));
  CHECK((filled.value_dim == 16 && filled.scale == 0.25F));
  CHECK((filled.query_heads() == 6 && !filled.rope.rotates() && !filled.check_finite));
  attention_spec given = plain;
  given.scale = 2, given.value_dim = 9, given.check_finite = true;
  given.rope = rotary::halves(100).dims(8);
  const attention_spec kept = given.checked();
  CHECK((kept.scale == 2 && kept.value_dim == 9 && kept.check_finite));
  CHECK(kept.rope == given.rope);
}

TEST_CASE("attention_spec: what cannot be is refused by name", "[attention_spec][errors]") {
  const auto invalid = kvmeld::errc::invalid_argument;
  for (const int n : {0, -1}) {
    const std::string got = "got " + std::to_string(n);
    refuses(invalid, "at least 1 KV head, " + got, [&](auto& s) { s.kv_heads = n; });
    refuses(invalid, "at least 1 query head, " + got, [&](auto& s) { s.group = n; });
    refuses(invalid, "a key_dim of 1 to 4096, " + got, [&](auto& s) { s.key_dim = n; });
  }
  refuses(invalid, "a key_dim of 1 to 4096, got 4097", [](auto& s) { s.key_dim = 4097; });
  refuses(invalid, "a value_dim of 1 to 4096", [](auto& s) { s.value_dim = -1; });
  for (const float x : {-1.0F, INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    refuses(invalid, "a finite scale above 0", [&](auto& s) { s.scale = x; });
  }
  for (const float x : {-1.0F, INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    refuses(invalid, "a finite soft_cap above 0", [&](auto& s) { s.soft_cap = x; });
  }
  refuses(invalid, "sink_logits [6] or none, got 3", [](auto& s) { s.sink_logits = {0, 0, 0}; });
  refuses(invalid, "alibi_slopes [6] or none, got 7",
          [](auto& s) { s.alibi_slopes = {1, 1, 1, 1, 1, 1, 1}; });
  refuses(invalid, "finite sink_logits, got inf",
          [](auto& s) { s.sink_logits = {0, 0, 0, 0, 0, INFINITY}; });
  refuses(invalid, "finite alibi_slopes, got nan", [](auto& s) {
    s.alibi_slopes = {1, 1, std::numeric_limits<float>::quiet_NaN(), 1, 1, 1};
  });
  refuses(invalid, "a window of at least 1 token", [](auto& s) { s.window = -1; });
  refuses(invalid, "at most 16 rotated dimensions, got 18",
          [](auto& s) { s.rope = rotary::halves(100).dims(18); });
}

TEST_CASE("a model without rotation: keys are compared and moved as they are", "[attention_spec]") {
  // With a rotation of next to nothing every policy does the same, so that none falls back to one.
  const auto run = [](const kvmeld::any_policy_or_peer& policy, const rotary& rope) {
    kvmeld::cache kv({.kv_heads = 1, .key_dim = 4, .rope = rope}, {.capacity = 64});
    std::vector<float> rows, numbers(64 * 4);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<float>((i * 37 + i / 7) % 23) / 8 - 1;
    }
    kv.append(kv.heads(0, 0), numbers, numbers, 64);
    auto state = fixtures::make_state(policy, kv);
    const auto own = kvmeld::prompt_queries(numbers.data(), 64, 1, 1, 4);
    fixtures::observe(policy, kv, state, own);
    const auto ahead = evaluate::lookahead(kv, own, {.count = 16});
    fixtures::compress(policy, kv, state, ahead.view(), kvmeld::budget{40});
    for (kvmeld::index_t s = 0; s < 40; ++s) {
      for (kvmeld::index_t i = 0; i < 4; ++i) {
        rows.push_back(kv.head(0).key(s)[i]);
      }
    }
    return rows;
  };
  const std::vector<double> nothing{0, 0};
  const rotary still = rotary::table(nothing, rotary::pairing::halves);
  for (const char* name :
       {"fold", "fold:pins=1", "ems:with_position=0", "compactor", "expected_attention"}) {
    INFO(name);
    const auto policy = kvmeld::make_policy<kvmeld::any_policy_or_peer>(name);
    CHECK(run(policy, {}) == run(policy, still));
    CHECK_FALSE(run(policy, {}) == run(policy, rotary::halves(10'000)));
  }
}

}  // namespace attention_spec_test
