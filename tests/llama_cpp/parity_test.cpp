// SPDX-License-Identifier: MIT
// llama.cpp behind the adapter against our own engine, both compressing by the same policy.
#include <catch2/catch.hpp>

#include "llama_cpp/streams.hpp"

namespace parity_test {

using namespace test;

TEST_CASE("llama.cpp: every policy gives the logits of our own engine, in both modes") {
  const twin models;
  const both_engines both{models.ours, models.theirs.get()};
  const auto text = draw_tokens(2048, models.shape.vocab);
  const stream_logits whole[] = {both.whole(text, false), both.whole(text, true)};
  for (const std::string& name : every_policy_name()) {
    const auto p = policy_named(name);
    // Attention Matching fits nearly as many masses as it has queries: what the two engines round
    // apart grows with every fit. It is held to the first four. fold chooses seeds among points of
    // halfs: what is rounded apart moves one by half's last bit now and then, and another seed is
    // as good. It is held to the first three.
    const std::size_t count = p.name() == "attention_matching" ? 5 * both_engines::chunk
                              : p.name() == "fold"             ? 4 * both_engines::chunk
                                                               : text.size();
    const auto d = both.compressed(p, std::span(text).first(count),
                                   whole[kvmeld::declared(p).supports_decode() ? 1 : 0]);
    CAPTURE(name, d.effect, d.to_repack, d.to_own, d.modes);
    CHECK(d.to_repack < 1e-3F);
    CHECK(d.to_own < 1e-3F);
    CHECK(d.modes < 1e-3F);
    CHECK(d.effect > 1000 * std::max(d.to_repack, d.to_own));
  }
}

}  // namespace parity_test
