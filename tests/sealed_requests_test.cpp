// SPDX-License-Identifier: MIT
// Requests whose page tables begin with the same sealed pages: nothing that one does changes
// another.
#include <catch2/catch.hpp>
#include <random>
#include <sstream>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/shared_prefix.hpp"

namespace sealed_requests_test {

using namespace shared_prefix;

TEST_CASE("requests on one sealed prefix are what they are on pages of their own", "[seal][fuzz]") {
  const char* const names[] = {"h2o",
                               "fold",
                               "zsmerge",
                               "keepkv",
                               "cam",
                               "d2o",
                               "kvmerger",
                               "roco",
                               "snapkv:window=4",
                               "centroids:window=4",
                               "compactor",
                               "tova",
                               "streaming_llm",
                               "key_diff",
                               "r_kv:window=4",
                               "triattention",
                               "scissorhands",
                               "random:window=4,prompt=1",
                               "snapkv+massfold:window=4",
                               "expected_attention"};
  std::mt19937 bits(7);
  const auto one_of = [&](index_t n) {
    return static_cast<index_t>(bits() % static_cast<std::uint32_t>(n));
  };
  for (const char* const name : names) {
    for (const bool compressed : {false, true}) {
      CAPTURE(name, compressed);
      const auto policy = kvmeld::make_policy<kvmeld::any_policy_or_peer>(name);
      const budget b{.slots = 20};
      engine all(true, policy, b), each(false, policy, b);
      const auto both = [&](auto call) { call(all), call(each); };
      // Request 0 holds the prefix alone: 12 tokens, or 40 in 20 slots.
      const auto prefix = each_layer(compressed ? 40 : 12);
      both([&](engine& e) {
        compressed ? e.prompt(0, prefix) : e.append(0, prefix);
        e.meld.seal(0, prefix[0].count);
        for (index_t r = 1; r < requests; ++r) {
          e.copy(0, r);
        }
      });
      const floats sealed = all.bytes(0);
      REQUIRE(all.entry(0, 0) == all.entry(1, 0));
      for (index_t turn = 0; turn < 60; ++turn) {
        const index_t r = 1 + one_of(requests - 1), what = one_of(12);
        if (what < 6) {
          const auto x = each_layer(1);
          CHECK(all.step(r, x) == each.step(r, x));
        } else if (what < 8) {
          const auto x = each_layer(3);
          const index_t n = one_of(4);
          CHECK(all.draft(r, x, n) == each.draft(r, x, n));
        } else if (what < 10) {
          const auto x = each_layer(1 + one_of(12));
          both([&](engine& e) { e.prompt(r, x); });
        } else if (what == 10) {
          const index_t from = one_of(requests);
          both([&](engine& e) {
            if (from != r) {
              e.copy(from, r);
            }
          });
        } else {
          both([&](engine& e) { e.copy(0, r); });
        }
        for (index_t other = 0; other < requests; ++other) {
          REQUIRE(all.bytes(other) == each.bytes(other));
        }
        REQUIRE(all.bytes(0) == sealed);
      }
    }
  }
}

TEST_CASE("sealed pages are in use whatever a request does behind them", "[seal][paged]") {
  engine e(true, kvmeld::h2o{}, {.slots = 20});
  e.append(0, each_layer(12)), e.meld.seal(0, 12);
  e.copy(0, 1);
  e.prompt(1, each_layer(30));
  CHECK(e.head(0, 1).length() == 12 + 20);
  CHECK(e.kv.pages(e.kv.heads(0, 1)[0]) == 8);
  CHECK(e.kv.free_pages(e.kv.heads(0, 1)).size() == pages - 8);
  CHECK(e.pool.size() == pages * requests - 3 - 5);
  e.clear(1);
  CHECK(e.pool.size() == pages * requests - 3);
  CHECK(e.meld.sealed(e.kv.heads(0, 1)[0]) == 0);
}

TEST_CASE("a prefix that was compressed once serves many questions, after it was saved too",
          "[seal]") {
  const auto prefix = each_layer(40);
  std::stringstream file, plain;
  engine first(true, kvmeld::fold{}, {.slots = 16});
  first.prompt(0, prefix);
  first.meld.save(plain, 0);
  first.meld.seal(0, 40);
  first.meld.save(file, 0);
  CHECK(file.str().size() != plain.str().size());
  engine later(true, kvmeld::fold{}, {.slots = 16});
  later.grow(0, 16), later.grow(3, 16);
  SECTION("with its seal") { later.meld.load(file, 0); }
  SECTION("without") {
    later.meld.load(plain, 0);
    CHECK(later.meld.sealed(0) == 0);
    later.meld.seal(0, 40);
  }
  CHECK((later.meld.sealed(0) == 16 && later.bytes(0) == first.bytes(0)));
  for (index_t r = 1; r < 3; ++r) {
    const auto question = each_layer(25);
    for (engine* e : {&first, &later}) {
      e->copy(0, r), e->prompt(r, question);
    }
    for (index_t t = 0; t < 10; ++t) {
      const auto x = each_layer(1);
      CHECK(first.step(r, x) == later.step(r, x));
    }
    CHECK((first.bytes(r) == later.bytes(r) && later.head(0, r).length() == 32));
  }
  CHECK(later.bytes(0) == first.bytes(0));
  std::stringstream question;  // and one that was saved behind it goes on
  first.meld.save(question, 1);
  later.clear(3), later.grow(3, 32);
  later.meld.load(question, 3);
  const auto x = each_layer(1);
  CHECK(first.step(1, x) == later.step(3, x));
}

}  // namespace sealed_requests_test
