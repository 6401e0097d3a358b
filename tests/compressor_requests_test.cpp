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

namespace {

using namespace small_model;
using kvmeld::budget;

}  // namespace

TEST_CASE("compressor: requests are emptied, copied, and stepped by threads of their own") {
  const index_t tokens = 60;
  for (const char* name : {"h2o", "fold", "ems:window=8", "zsmerge"}) {
    CAPTURE(name);
    model_cache kv(128), twin(128);
    const prompt_rows prompt(tokens);
    kvmeld::compressor meld(kv, kvmeld::make_policy(name), budget{.slots = 48});
    kvmeld::compressor serial(twin, kvmeld::make_policy(name), budget{.slots = 48});
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
    kvmeld::compressor meld(kv, kvmeld::make_policy(name), limit);
    kvmeld::compressor loaded(other, kvmeld::make_policy(name), limit);
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
    const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim),
               v = normal(kv_heads_of * dim);
    std::vector<float> out(q.size()), same(q.size());
    meld.step(model_cache::of(0, 0), {q, k, v}, out);
    taken.step(model_cache::of(0, 0), {q, k, v}, same);
    REQUIRE(out == same);
  }
  CHECK((same_head(kv.head(0), other.head(0)) && same_state(meld.state(0), taken.state(0))));
  CHECK_THROWS_WITH(taken.set_state(0, kvmeld::make_head_state(kvmeld::fold{}, kv.head(0))),
                    Catch::Contains("h2o") && Catch::Contains("fold"));
  CHECK_THROWS_AS(taken.set_state(kv.heads(), meld.state(0)), kvmeld::error);
  CHECK(same_state(meld.state(0), taken.state(0)));
}
