// SPDX-License-Identifier: MIT
// A prompt longer than its cache: compressed chunk by chunk while it comes.
#include <algorithm>  // std::ranges::find
#include <catch2/catch.hpp>
#include <sstream>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace long_prompts_test {

using namespace small_model;
using kvmeld::as_size;

TEST_CASE("every policy compresses a prompt while it comes, within a budget and a chunk",
          "[compressor]") {
  constexpr index_t slots = 48, chunk = 64, chunks = 8;
  for (const fixtures::example& e : fixtures::every_policy()) {
    if (!kvmeld::declared(e.policy).evicts()) {
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
    if (kvmeld::declared(e.policy).supports_decode()) {
      const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim);
      std::vector<float> out(q.size());
      meld.step(model_cache::of(0, 0), {q, k, k}, out);
      CHECK(kv.head(0).length() <= slots);
    }
  }
}

/// A chunk whose layer 0 attends to all tokens, and layer 1 to the first of all.
prompt_rows uneven_rows(index_t tokens, bool first) {
  prompt_rows x(tokens);
  for (std::vector<float>& q : x.q) {
    for (float& e : q) {
      e = 1 + 0.1F * e;
    }
  }
  std::ranges::fill(x.k[0], 0.0F);
  if (first) {
    std::fill_n(x.k[1].begin(), kv_heads_of * dim, 5.0F);
  }
  return x;
}

TEST_CASE("every policy that shares slots reads a prompt longer than its cache chunk by chunk",
          "[compressor]") {
  constexpr index_t slots = 24, capacity = 96, slack = 3;
  int longer = 0;
  for (const fixtures::example& e : fixtures::every_policy()) {
    if (!kvmeld::declared(e.policy).evicts() || !kvmeld::declared(e.policy).shares()) {
      continue;
    }
    for (const index_t chunk : {48, 31}) {
      for (const auto& limit : {kvmeld::budget::shared(slots), kvmeld::budget::shared(slots, slack),
                                kvmeld::budget::shared_by_layer(slots)}) {
        if (limit.slack > 0 && !kvmeld::declared(e.policy).supports_decode()) {
          continue;  // refused
        }
        CAPTURE(e.name, chunk, limit.slack, limit.by_layer);
        model_cache kv(capacity);
        kvmeld::compressor meld(kv, e.policy, limit);
        for (index_t first = 0; first < 410; first += chunk) {
          const index_t tokens = std::min(chunk, 410 - first);
          const auto x = uneven_rows(tokens, first == 0);
          for (index_t l = 0; l < layers_of; ++l) {
            REQUIRE_NOTHROW(kv.append(kv.heads(l, 0), x.k[as_size(l)], x.v[as_size(l)], tokens));
            meld.prompt(kv.heads(l, 0),
                        kvmeld::queries(x.queries(l, 0, tokens), tokens, layer_spec));
          }
          meld.end_prompt(0);
          index_t held = 0;
          for (const index_t h : {0, 1, 4, 5}) {
            held += kv.head(h).length();
            longer += kv.head(h).length() > slots ? 1 : 0;
            CHECK(kv.head(h).length() <= capacity - (first == 0 ? slack : tokens));
          }
          CHECK(held <= 4 * slots);
        }
        if (kvmeld::declared(e.policy).supports_decode()) {
          const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim);
          std::vector<float> out(q.size());
          for (index_t step = 0; step < 2 * slack; ++step) {
            meld.step(model_cache::of(0, 0), {q, k, k}, out);
            meld.step(model_cache::of(1, 0), {q, k, k}, out);
          }
        }
      }
    }
  }
  CHECK(longer > 100);
}

TEST_CASE("a head leaves room for a chunk that is measured in part, wherever its request is",
          "[compressor]") {
  constexpr index_t slots = 24, capacity = 96, chunk = 48;
  for (const index_t measured : {chunk, chunk / 3}) {
    for (const bool moves : {false, true}) {
      CAPTURE(measured, moves);
      model_cache kv(capacity);
      kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget::shared(slots));
      index_t request = 0;
      for (index_t c = 0; c < 6; ++c) {
        auto x = uneven_rows(chunk, c == 0);
        for (std::size_t row = dim; row < x.k[0].size(); row += kv_heads_of * dim) {
          std::copy_n(&x.k[1][row], dim, &x.k[0][row]);  // one long head alone
        }
        for (index_t l = 0; l < layers_of; ++l) {
          const auto heads = kv.heads(l, request);
          REQUIRE_NOTHROW(kv.append(heads, x.k[as_size(l)], x.v[as_size(l)], chunk));
          meld.prompt(heads,
                      kvmeld::queries(x.queries(l, chunk - measured, chunk), measured, layer_spec));
        }
        meld.end_prompt(request);
        if (moves) {
          std::stringstream saved;
          meld.save(saved, request), meld.clear(request);
          request = 1 - request;
          meld.load(saved, request);
        }
      }
    }
  }
}

TEST_CASE("a shared budget's cap holds, and what a head cannot take goes to the others",
          "[compressor]") {
  const auto x = uneven_rows(80, true);
  for (const index_t most : {0, 24, 30, 70}) {
    model_cache kv(81);
    kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget::shared(24, 0, most));
    read(meld, kv, x, 0, 80);
    meld.end_prompt(0);
    index_t held = 0, longest = 0;
    for (const index_t h : {0, 1, 4, 5}) {
      held += kv.head(h).length();
      longest = std::max(longest, kv.head(h).length());
    }
    CHECK(held == 4 * 24);
    CHECK((most == 0 ? longest > 30 : longest <= most));
  }
  model_cache kv(81);
  CHECK_THROWS_WITH(
      kvmeld::compressor(kv, kvmeld::h2o{}, kvmeld::budget::shared(24, 0, 23)),
      Catch::Contains(
          "compressor: expected a cap of at least 24 slots a head (the mean that heads share), got "
          "23"));
  // The longest head leaves room for its slack and the new token.
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget::shared(40, 20));
  read(meld, kv, x, 0, 80);
  meld.end_prompt(0);
  CHECK(std::max(kv.head(0).length(), kv.head(1).length()) == 60);
}

/// Slots of the heads of request 0 after a prompt that was read `chunk` tokens at a time.
std::vector<index_t> divided(const kvmeld::any_policy_or_peer& p, const prompt_rows& x,
                             index_t chunk) {
  model_cache kv(x.tokens + 1);
  kvmeld::compressor meld(kv, p, kvmeld::budget::shared(48));
  for (index_t first = 0; first < x.tokens; first += chunk) {
    const index_t last = std::min(first + chunk, x.tokens);
    for (index_t l = 0; l < layers_of; ++l) {
      x.append(kv, l, 0, first, last);
      meld.prompt(model_cache::of(l, 0),
                  kvmeld::queries(x.queries(l, first, last), last - first, layer_spec));
    }
  }
  meld.end_prompt(0);
  return {kv.head(0).length(), kv.head(1).length(), kv.head(4).length(), kv.head(5).length()};
}

TEST_CASE("a shared budget is divided alike whatever chunks a prompt comes in, but by fold",
          "[compressor]") {
  prompt_rows x(180);
  for (std::size_t i = 0; i < x.k[1].size(); ++i) {
    x.k[1][i] *= i / dim % kv_heads_of == 0 ? 2.0F : 0.5F;
  }
  int uneven = 0;
  for (const fixtures::example& e : fixtures::every_policy()) {
    if (!kvmeld::declared(e.policy).evicts() || !kvmeld::declared(e.policy).shares()) {
      continue;
    }
    CAPTURE(e.name);
    const auto whole = divided(e.policy, x, x.tokens);
    uneven += whole[0] != whole[3] ? 1 : 0;
    for (const index_t chunk : {90, 64, 7}) {
      CAPTURE(chunk);
      const auto parts = divided(e.policy, x, chunk);
      if (e.name.starts_with("fold")) {  // its chunks do not see the tokens after them
        CHECK(std::ranges::max(parts) > 48);
      } else {
        CHECK(parts == whole);
      }
    }
  }
  CHECK(uneven > 5);
}

}  // namespace long_prompts_test
