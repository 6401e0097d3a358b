// SPDX-License-Identifier: MIT
// Requests of a compressor: emptied, copied, saved, and taken over.
#include <algorithm>  // std::ranges::equal
#include <catch2/catch.hpp>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace compressor_requests_test {

using namespace small_model;
using kvmeld::budget;

TEST_CASE("compressor: requests are emptied, copied, and stepped by threads of their own") {
  const index_t tokens = 60;
  for (const char* name : {"h2o", "fold", "ems:window=8", "zsmerge"}) {
    CAPTURE(name);
    model_cache kv(128), twin(128);
    const prompt_rows prompt(tokens);
    kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                            budget{.slots = 48});
    kvmeld::compressor serial(twin, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                              budget{.slots = 48});
    for (auto* one : {&meld, &serial}) {
      model_cache& of = one == &meld ? kv : twin;
      read(*one, of, prompt, 0, tokens), one->end_prompt(0);
      one->copy(0, 1);
    }
    CHECK(same_head(kv.head(0), kv.head(kv_heads_of)));
    const auto run = [&](auto& one, index_t r, std::uint32_t seed) {
      std::mt19937 bits(seed);
      std::normal_distribution<float> gauss;
      const auto numbers = [&](index_t n) {
        std::vector<float> x(static_cast<std::size_t>(n));
        std::ranges::generate(x, [&] { return gauss(bits); });
        return x;
      };
      std::vector<float> out(static_cast<std::size_t>(kv_heads_of * group * dim));
      for (index_t step = 0; step < 40; ++step) {
        for (index_t l = 0; l < layers_of; ++l) {
          const auto q = numbers(kv_heads_of * group * dim), k = numbers(kv_heads_of * dim),
                     v = numbers(kv_heads_of * dim);
          one.step(model_cache::of(l, r), {q, k, v}, out);
        }
      }
    };
    std::thread first([&] { run(meld, 0, 1); }), second([&] { run(meld, 1, 2); });
    first.join(), second.join();
    run(serial, 0, 1), run(serial, 1, 2);
    for (index_t h = 0; h < kv.heads(); ++h) {
      CHECK(same_head(kv.head(h), twin.head(h)));
      CHECK(same_state(meld.state(h), serial.state(h)));
    }
    meld.clear(0);
    CHECK(kv.head(0).length() == 0);
    CHECK(kv.head(0).next_position() == 0);
    CHECK(kv.head(kv_heads_of).length() > 0);
  }
}

TEST_CASE("compressor: a request is saved, and goes on in another place bit for bit") {
  const index_t tokens = 60;
  for (const char* name : {"h2o", "fold", "ems:window=8", "keepkv"}) {
    CAPTURE(name);
    model_cache kv(128), other(128);
    const prompt_rows prompt(tokens);
    const bool shares = std::string(name) == "fold";
    const budget limit = shares ? budget::shared(40) : budget{.slots = 48};
    kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name), limit);
    kvmeld::compressor loaded(other, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name), limit);
    read(meld, kv, prompt, 0, tokens);
    std::stringstream file;
    CHECK_THROWS_WITH(meld.save(file, 0), Catch::Contains("end_prompt first"));
    meld.end_prompt(0);
    meld.save(file, 0);
    const std::string bytes = file.str();
    for (const std::size_t cut : {bytes.size() / 2, std::size_t{9}}) {
      std::istringstream part(bytes.substr(0, cut));
      CHECK_THROWS_AS(loaded.load(part, 1), kvmeld::error);
      CHECK(other.head(kv_heads_of).length() == 0);
    }
    std::istringstream in(bytes);
    loaded.load(in, 1);
    std::vector<float> out(static_cast<std::size_t>(kv_heads_of * group * dim)), same(out);
    for (index_t step = 0; step < 20; ++step) {
      for (index_t l = 0; l < layers_of; ++l) {
        const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim),
                   v = normal(kv_heads_of * dim);
        meld.step(model_cache::of(l, 0), {q, k, v}, out);
        loaded.step(model_cache::of(l, 1), {q, k, v}, same);
        REQUIRE(out == same);
      }
    }
  }
}

TEST_CASE("compressor: a head that was compressed elsewhere goes on as its own do") {
  model_cache kv(64);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = 32});
  read(meld, kv, prompt_rows(50), 0, 50);
  meld.end_prompt(0);
  model_cache other = kv;
  kvmeld::compressor taken(other, kvmeld::h2o{}, budget{.slots = 32});
  for (index_t h = 0; h < kv.heads(); ++h) {
    taken.set_state(h, meld.state(h));
  }
  for (index_t step = 0; step < 20; ++step) {
    for (index_t l = 0; l < layers_of; ++l) {
      const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim),
                 v = normal(kv_heads_of * dim);
      std::vector<float> out(q.size()), same(q.size());
      meld.step(model_cache::of(l, 0), {q, k, v}, out);
      taken.step(model_cache::of(l, 0), {q, k, v}, same);
      REQUIRE(out == same);
    }
  }
  CHECK((same_head(kv.head(0), other.head(0)) && same_state(meld.state(0), taken.state(0))));
  CHECK_THROWS_WITH(taken.set_state(0, kvmeld::make_head_state(kvmeld::fold{}, kv.head(0))),
                    Catch::Contains("h2o") && Catch::Contains("fold"));
  CHECK_THROWS_AS(taken.set_state(kv.heads(), meld.state(0)), kvmeld::error);
  CHECK(same_state(meld.state(0), taken.state(0)));
}

TEST_CASE("compressor: a request of a cache that was shrunk goes to another of that size") {
  const index_t tokens = 60, slots = 48;
  for (const char* name : {"h2o", "fold", "ems:window=8", "zsmerge"}) {
    CAPTURE(name);
    model_cache kv(128), small(slots + 1);
    kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                            budget{.slots = slots});
    kvmeld::compressor loaded(small, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                              budget{.slots = slots});
    read(meld, kv, prompt_rows(tokens), 0, tokens), meld.end_prompt(0);
    kv.shrink(meld, slots + 1);
    std::stringstream file;
    meld.save(file, 0);
    if (std::string(name).starts_with("ems")) {  // whose memory is laid out for the first capacity
      CHECK_THROWS_WITH(loaded.load(file, 1), Catch::Contains("expected floats of memory"));
      continue;
    }
    loaded.load(file, 1);
    CHECK(same_head(kv.head(0), small.head(kv_heads_of)));
    CHECK(same_state(meld.state(0), loaded.state(kv_heads_of)));
  }
}

TEST_CASE("compressor: a head that others emptied or set back is refused until it is cleared") {
  const index_t tokens = 60, slots = 48;
  for (const auto& example : fixtures::every_policy()) {
    for (const int how : {0, 1, 2}) {
      CAPTURE(example.name, how);
      model_cache kv(200), fresh(200);
      kvmeld::compressor meld(kv, example.policy, budget{.slots = slots});
      kvmeld::compressor wanted(fresh, example.policy, budget{.slots = slots});
      read(meld, kv, prompt_rows(tokens), 0, tokens), meld.end_prompt(0);
      const prompt_rows next(tokens + how);
      for (index_t l = 0; l < layers_of; ++l) {
        for (index_t i = 0; i < kv_heads_of; ++i) {
          const auto head = kv.head(model_cache::of(l, 0).first + i);
          how == 0 ? head.restore(0, 0) : head.truncate(how == 1 ? 0 : head.length() - 2);
        }
      }
      const auto refused = Catch::Contains("expected head 0 as it was left");
      std::stringstream file;
      CHECK_THROWS_WITH(meld.save(file, 0), refused);
      if (how < 2) {
        next.append(kv, 0, 0, 0, next.tokens);
      }
      const auto of = model_cache::of(0, 0);
      const kvmeld::queries q(next.queries(0, 0, next.tokens), next.tokens, layer_spec);
      CHECK_THROWS_WITH(meld.prompt(of, q), refused);
      CHECK_THROWS_WITH(meld.compress(of), refused);
      if (kvmeld::declared(example.policy).supports_decode()) {
        const auto x = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim);
        std::vector<float> out(x.size());
        CHECK_THROWS_WITH(meld.step(of, {x, k, k}, out), refused);
        CHECK_THROWS_WITH(meld.draft(of, {x, k, k}, out, 1), refused);
      }
      CHECK_THROWS_WITH(meld.copy(0, 1), refused);
      meld.clear(0);
      read(meld, kv, next, 0, next.tokens), meld.end_prompt(0);
      read(wanted, fresh, next, 0, next.tokens), wanted.end_prompt(0);
      for (index_t h = 0; h < kv.heads(); ++h) {
        CHECK(same_head(kv.head(h), fresh.head(h)));
        CHECK(same_state(meld.state(h), wanted.state(h)));
      }
    }
  }
}

TEST_CASE("compressor: tokens are taken back by drafts, not by lengths once slots have moved") {
  for (const char* name : {"streaming_llm", "h2o", "zsmerge"}) {
    CAPTURE(name);
    model_cache kv(21);
    kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                            budget{.slots = 20});
    const auto heads = model_cache::of(0, 0);
    std::vector<float> out(static_cast<std::size_t>(kv_heads_of * group * dim));
    const auto step = [&] {
      meld.step(
          heads,
          {normal(kv_heads_of * group * dim), normal(kv_heads_of * dim), normal(kv_heads_of * dim)},
          out);
    };
    step(), step(), step();
    const auto head = kv.head(0);
    const auto rows = fixtures::bytes_of(head);
    head.restore(1, 1);  // in order still: the state alone is ahead
    const auto refused = Catch::Contains("expected head 0 as it was left");
    CHECK_THROWS_WITH(step(), refused);
    head.restore(3, 3);  // which rows these are is not known
    CHECK(fixtures::bytes_of(head) == rows);
    CHECK_THROWS_WITH(step(), refused);
    meld.clear(0), step(), step(), step();
    for (index_t t = 0; t < 60; ++t) {
      step();
    }
    CHECK_THROWS_WITH(head.restore(head.length() - 2, head.next_position() - 2),
                      Catch::Contains("restore: expected slots of tokens before 61, got token 6"));
    CHECK((head.length() == 20 && head.next_position() == 63));
    CHECK_NOTHROW(step());
  }
}

}  // namespace compressor_requests_test
