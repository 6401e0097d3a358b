// SPDX-License-Identifier: MIT
// Holds the oracle's rotation, and StreamingLLM's positions by cache index, against what must hold
// of them.
#include <catch2/catch.hpp>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"

namespace rope_test {

using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::vec;

TEST_CASE("rotation keeps dot products at equal distance, in both layouts", "[oracle]") {
  oracle::rope r;
  r.interleaved = GENERATE(false, true);
  if (GENERATE(false, true)) r.llama3 = oracle::llama3_scaling{};
  const vec a = normal(8), b = normal(8);
  const double far = oracle::dot(rotated(a, 107, r), rotated(b, 100, r));
  CHECK(far == Approx(oracle::dot(rotated(a, 7, r), b)));
  CHECK(oracle::difference(rotated(rotated(a, 31, r), -31, r), a) < 1e-12);
  const vec once = rotated({1, 0}, 1, r);  // frequency 1: too short a wave for any scaling
  CHECK(once[0] == Approx(std::cos(1.0)));
  CHECK(once[1] == Approx(std::sin(1.0)));
  CHECK(oracle::frequency({}, 1, 8) == Approx(0.1));
}

TEST_CASE("llama3 scaling slows long waves only", "[oracle]") {
  const oracle::rope plain{.base = 500000};
  oracle::rope scaled = plain;
  scaled.llama3 = oracle::llama3_scaling{};
  CHECK(frequency(scaled, 0, 128) == frequency(plain, 0, 128));
  CHECK(frequency(scaled, 63, 128) == Approx(frequency(plain, 63, 128) / 8));
  for (int i = 1; i < 64; ++i) {
    const double slower = frequency(plain, i, 128) / frequency(scaled, i, 128);
    CHECK((slower >= 1 - 1e-12 && slower <= 8 + 1e-12));
    CHECK(frequency(scaled, i, 128) < frequency(scaled, i - 1, 128));
  }
}

TEST_CASE("StreamingLLM by cache index is the sinks rotated forward by what was dropped",
          "[oracle]") {
  oracle::streaming_llm by_index{.sinks = 2, .cache_index = true};
  by_index.rotation.interleaved = GENERATE(false, true);
  const int prompt = GENERATE(1, 5, 20);
  const int target = 8;
  head raw = oracle::make_head(6, 2);   // keys before rotation
  head kept = oracle::make_head(6, 2);  // keys at their own position, sinks moved at evictions
  const oracle::streaming_llm original{.sinks = 2};
  const oracle::rope& rope = by_index.rotation;
  auto evict = [&] {
    const auto dropped = static_cast<int>(kept.slots.size()) - target;
    if (dropped <= 0) return;
    original.evict_to(kept, target);
    for (std::size_t s = 0; s < 2; ++s)
      kept.slots[s].key = rotated(kept.slots[s].key, dropped, rope);
  };
  for (int t = 0; t < prompt; ++t) {
    const vec k = normal(6), v = normal(6);
    append(raw, k, v);
    append(kept, rotated(k, t, rope), v);
  }
  by_index.prompt(raw, {}, {}, target);
  evict();
  for (int t = prompt; t < prompt + 25; ++t) {
    const vec k = normal(6), v = normal(6);
    const mat q = normal(2, 6);
    const mat expected = by_index.step(raw, q, k, v, target);
    append(kept, rotated(k, t, rope), v);
    const mat output = attend(kept, {rotated(q[0], t, rope), rotated(q[1], t, rope)}).output;
    evict();
    CHECK(oracle::difference(output, expected) < 1e-12);
    // The stored keys are those by index, the newest one put at its own position.
    const int shift = newest(raw) - static_cast<int>(raw.slots.size()) + 1;
    CHECK(set_difference(kept, by_index.rotated_by_index(raw, shift)) < 1e-12);
  }
}

}  // namespace rope_test
