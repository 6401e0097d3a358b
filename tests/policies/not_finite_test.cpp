// SPDX-License-Identifier: MIT
// NaN in one head: what any policy makes of it, and what it must leave alone.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace not_finite_test {

using fixtures::index_t;
using fixtures::normal;
using kvmeld::errc;

constexpr index_t heads = 3, broken = 1, group = 2, dim = 8, prompt = 70, steps = 60, at = 10;
constexpr kvmeld::budget most{.slots = 32, .trigger = 35};

/// Where the number lies: a key, a value or a query, of the prompt or of a step.
enum class place { none, key, value, query };

using bits = std::vector<std::uint32_t>;

struct three_heads {
  kvmeld::any_policy_or_peer policy;
  fixtures::cache<float> kv;
  fixtures::state state = fixtures::make_state(policy, kv);
  int refused = 0;  ///< calls

  three_heads(const kvmeld::any_policy_or_peer& p, bool check)
      : policy(p),
        kv({.heads = heads, .group = group, .dim = dim, .capacity = 90, .check_finite = check}) {}

  /// All that is known of head `h`.
  bits of(index_t h) {
    bits all;
    const auto add = [&](std::span<const float> x) {
      for (const float e : x) {
        all.push_back(std::bit_cast<std::uint32_t>(e));
      }
    };
    add(fixtures::bytes_of(kv.head(h)));
    for (index_t c = 0; c < state[h].slot_stats(); ++c) {
      add(state[h].column(c));
    }
    add(state[h].memory());
    all.push_back(static_cast<std::uint32_t>(kv.head(h).next_position()));
    all.push_back(static_cast<std::uint32_t>(state[h].observed()));
    return all;
  }

  /// What is refused is so for NaN, and leaves its head as it was.
  template <class Call>
  void one(index_t h, Call call) {
    const bits before = of(h);
    try {
      call();
    } catch (const kvmeld::error& e) {
      INFO(e.what());
      CHECK(e.code() == errc::not_finite);
      CHECK(h == broken);
      CHECK(of(h) == before);
      ++refused;
    }
  }

  /// A prompt, its compression, and steps, head by head. `bad` is in the prompt or, `late`, in one
  /// step. The numbers drawn are the same whatever is broken.
  void run(place where, float bad, bool late) {
    streams::restart();
    for (index_t h = 0; h < heads; ++h) {
      auto k = normal(prompt * dim), v = normal(prompt * dim), q = normal(prompt * group * dim);
      if (h == broken && !late) {
        spoil(where, bad, k, v, q, 20);
      }
      one(h, [&] { kv.append(h, k, v); });
      if (kv.head(h).length() == 0) {
        continue;
      }
      const auto queries = kvmeld::prompt_queries(q.data(), prompt, 1, group, dim);
      one(h, [&] { kvmeld::observe(policy, kv.head(h), state[h], queries); });
      one(h, [&] {
        kvmeld::compress(policy, kv.head(h), state[h], state.workspace(), most, queries);
      });
    }
    std::vector<float> out(group * dim);
    for (index_t t = 0; t < steps && kvmeld::declared(policy).supports_decode(); ++t) {
      for (index_t h = 0; h < heads; ++h) {
        auto k = normal(dim), v = normal(dim), q = normal(group * dim);
        if (h == broken && late && t == at) {
          spoil(where, bad, k, v, q, 0);
        }
        if (kv.head(h).length() < kv.head(h).capacity()) {  // else its prompt was refused
          one(h, [&] {
            kvmeld::step(policy, kv.head(h), state[h], state.workspace(), q.data(), k.data(),
                         v.data(), most, out.data());
          });
        }
      }
    }
  }

 private:
  static void spoil(place where, float bad, std::vector<float>& k, std::vector<float>& v,
                    std::vector<float>& q, std::size_t token) {
    if (where == place::key) {
      k[token * dim + 3] = bad;
    } else if (where == place::value) {
      v[token * dim + 3] = bad;
    } else if (where == place::query) {
      q[token * group * dim + 3] = bad;
    }
  }
};

const float bad_numbers[] = {std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity()};

TEST_CASE("what is not finite in one head changes no bit of the others", "[errors]") {
  for (const auto& example : fixtures::every_policy()) {
    three_heads sound(example.policy, false);
    sound.run(place::none, 0, false);
    CHECK(sound.refused == 0);
    for (const place where : {place::key, place::value, place::query}) {
      for (const float bad : bad_numbers) {
        for (const bool late : {false, true}) {
          for (const bool check : {false, true}) {
            CAPTURE(example.name, static_cast<int>(where), bad, late, check);
            three_heads with(example.policy, check);
            with.run(where, bad, late);
            for (index_t h = 0; h < heads; ++h) {
              CHECK((h == broken || with.of(h) == sound.of(h)));
            }
            // A step refuses each such number, and so does all else where the cache checks.
            const auto& p = example.policy;
            const bool queried = kvmeld::declared(p).uses_attention() ||
                                 kvmeld::declared(p).prompt_use().needs_queries();
            const bool comes =
                late ? kvmeld::declared(p).supports_decode() : where != place::query || queried;
            CHECK((with.refused > 0 || !comes || !(late || check)));
          }
        }
      }
    }
  }
}

}  // namespace not_finite_test
