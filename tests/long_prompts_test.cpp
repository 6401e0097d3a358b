// SPDX-License-Identifier: MIT
// A prompt longer than its cache: compressed chunk by chunk while it comes.
#include <algorithm>  // std::ranges::find
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace long_prompts_test {

using namespace small_model;

TEST_CASE("every policy compresses a prompt while it comes, within a budget and a chunk",
          "[compressor]") {
  constexpr index_t slots = 48, chunk = 64, chunks = 8;
  for (const fixtures::example& e : fixtures::every_policy()) {
    if (!kvmeld::traits::evicts(e.policy)) {
      continue;
    }
    CAPTURE(e.name);
    model_cache kv(slots + chunk);
    kvmeld::compressor meld(kv, e.policy, kvmeld::budget{.slots = slots});
    for (index_t c = 0; c < chunks; ++c) {
      read(meld, kv, prompt_rows(chunk), 0, chunk);
      CHECK(kv.head(0).length() <= slots + chunk);
      meld.end_prompt(0);
      for (index_t h : {0, 1}) {
        const auto head = kv.head(h);
        CHECK((head.length() <= slots && head.next_position() == (c + 1) * chunk));
        std::vector<index_t> positions;
        for (index_t s = 0; s < head.length(); ++s) {
          positions.push_back(head.position(s));
        }
        const auto holds = [&](index_t position) {
          return std::ranges::find(positions, position) != positions.end();
        };
        for (index_t i = 0; i < e.sinks; ++i) {
          CHECK(holds(i));
        }
        for (index_t i = 0; i < e.latest; ++i) {
          CHECK(holds(head.next_position() - 1 - i));
        }
      }
    }
    if (kvmeld::traits::supports_decode(e.policy)) {
      const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim);
      std::vector<float> out(q.size());
      meld.step(model_cache::of(0, 0), {q, k, k}, out);
      CHECK(kv.head(0).length() <= slots);
    }
  }
}

}  // namespace long_prompts_test
