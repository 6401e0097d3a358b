// SPDX-License-Identifier: MIT
// Tokens that are pinned: they stay in every head of llama.cpp's layers, in either mode.
#include <algorithm>  // std::ranges::count
#include <catch2/catch.hpp>

#include "llama_cpp/announced.hpp"

namespace llama_pins_test {

using namespace test;
using Catch::Contains;
using kvmeld::budget;

constexpr index_t prompt = 150, steps = 40, slots = 48;
/// Spans of tokens: of the first micro-batch, of two of them, of single tokens after the prompt.
constexpr std::pair<index_t, index_t> spans[] = {{2, 5}, {60, 8}, {155, 2}};

/// Every pinned token has one slot in every head.
bool pins_stay(announced_llama& kv, index_t seen, index_t sequence = 0) {
  bool all = true;
  for (index_t l = 0; l < 2; ++l) {
    for (index_t h = 0; h < 2; ++h) {
      const auto held = kv.positions(l, h, sequence);
      for (const auto& [first, count] : spans) {
        for (index_t p = first; p < std::min(first + count, seen); ++p) {
          all = all && std::ranges::count(held, p) == 1;
        }
      }
    }
  }
  return all;
}

void pin_all(announced_llama& kv, llama_seq_id sequence = 0) {
  for (const auto& [first, count] : spans) {
    kv.kv.pin(first, count, sequence);
  }
}

TEST_CASE("llama.cpp: pinned tokens stay in every head, in both modes, within the budget") {
  const twin models;
  const auto text = draw_tokens(prompt + steps, models.shape.vocab);
  for (const std::string& name : every_decoding_policy()) {
    const auto p = policy_named(name);
    if (!kvmeld::declared(p).supports().seals) {
      continue;
    }
    for (const mode how : {mode::own_attention, mode::repack}) {
      for (const bool shared : {false, true}) {
        if (shared && !kvmeld::declared(p).shares()) {
          continue;
        }
        CAPTURE(name, how, shared);
        announced_llama kv(models.theirs.get(), p,
                           {.how = how,
                            .limits = {shared ? budget::shared(slots) : budget{.slots = slots}},
                            .capacity = how == mode::own_attention ? 256 : 0},
                           exact_parameters(256, 64));
        pin_all(kv);
        bool stay = true, finite = true, within = true;
        for (index_t at = 0; at < prompt + steps;) {
          const index_t n = at < prompt ? std::min<index_t>(64, prompt - at) : 1;
          finite = finite &&
                   kv.compressed_llama::decode(std::span(text).subspan(static_cast<std::size_t>(at),
                                                                       static_cast<std::size_t>(n)))
                       .allFinite();
          at += n;
          if (shared && at == prompt) {
            kv.kv.end_prompt();
          }
          stay = stay && pins_stay(kv, at);
          within = within && (shared || kv.kv.report().slots <= slots);
        }
        CHECK((stay && finite && within));
      }
    }
  }
}

TEST_CASE("llama.cpp: pins are a sequence's own, and end with it") {
  const twin models;
  const auto text = draw_tokens(prompt + steps, models.shape.vocab);
  const kvmeld::llama::options o{.how = mode::own_attention, .limits = {{.slots = slots}}};
  announced_llama kv(models.theirs.get(), policy_named("h2o:sinks=0"), o, parameters_for(2));
  pin_all(kv, 1);
  const auto read = [&] {
    for (index_t at = 0; at < 128; at += 64) {
      kv.decode(tokens_of(text, at, 64, 0)), kv.decode(tokens_of(text, at, 64, 1));
    }
  };
  read();
  CHECK(pins_stay(kv, 128, 1));
  CHECK(!pins_stay(kv, 128, 0));
  CHECK_THROWS_WITH(kv.kv.pin(20, 4, 0), Contains("earlier ones are compressed"));
  CHECK_THROWS_WITH(kv.kv.pin(200, 4, 2), Contains("expected a sequence of 0 to 1"));
  CHECK_THROWS_WITH(kv.kv.pin(130, slots, 1), Contains("pin: expected at most"));
  llama_memory_clear(kv.memory(), false);
  kv.kv.reset();
  read();
  CHECK(!pins_stay(kv, 128, 1));
  announced_llama other(models.theirs.get(), policy_named("ems:window=8"), o, parameters_for(1));
  CHECK_THROWS_WITH(other.kv.pin(0, 4), Contains("pin: ems"));
}

}  // namespace llama_pins_test
