// SPDX-License-Identifier: MIT
// Calls on heads of a layer that keep the same tokens: steps on an executor, and saved requests.
#include <catch2/catch.hpp>
#include <limits>
#include <sstream>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/model.hpp"

namespace same_tokens_calls_test {

using namespace small_model;
using kvmeld::budget;

constexpr index_t tokens = 90, slots = 48;

/// A token of every head of a layer.
struct one_row {
  std::vector<float> q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim), v = k;
};

/// An executor of two workers, the last head first, that counts its calls.
struct backwards {
  index_t* calls;

  static constexpr index_t workers() { return 2; }
  template <class F>
  void operator()(index_t count, F f) const {
    ++*calls;
    for (index_t i = count - 1; i >= 0; --i) {
      f(i, i % 2);
    }
  }
};

TEST_CASE("heads of the same tokens: what is due is planned on the caller's executor") {
  model_cache kv(40), serial(40);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(16, 4)),
      one(serial, kvmeld::h2o{}, budget::same_tokens(16, 4));
  std::vector<float> out(kv_heads_of * group * dim), wanted(out);
  index_t due = 0;
  for (index_t step = 0; step < 40; ++step) {
    const one_row x;
    index_t calls = 0;
    const index_t before = kv.head(0).length();
    meld.step(model_cache::of(0, 0), {x.q, x.k, x.v}, out, backwards{&calls});
    one.step(model_cache::of(0, 0), {x.q, x.k, x.v}, wanted);
    const bool evicts = kv.head(0).length() <= before;
    CHECK(calls == (evicts ? 2 : 1));
    CHECK(out == wanted);
    due += evicts ? 1 : 0;
  }
  CHECK((due > 0 && due < 40));
  for (const index_t h : {0, 1}) {
    CHECK((same_head(kv.head(h), serial.head(h)) && same_state(meld.state(h), one.state(h))));
  }
}

TEST_CASE("heads of the same tokens: a saved request of other tokens is refused", "[errors]") {
  model_cache kv(tokens + 4), own(tokens + 4);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(slots)),
      each(own, kvmeld::h2o{}, budget::shared(slots));
  const prompt_rows prompt(tokens);
  read(meld, kv, prompt, 0, tokens), meld.end_prompt(0);
  read(each, own, prompt, 0, tokens), each.end_prompt(0);
  std::stringstream alike, unlike;
  meld.save(alike, 0), each.save(unlike, 0);
  const model_cache before = kv;
  CHECK_THROWS_WITH(meld.load(unlike, 0),
                    Catch::Contains("load: expected all heads of each layer with the same tokens"));
  for (index_t h = 0; h < kv.heads(); ++h) {
    CHECK(same_head(kv.head(h), model_cache(before).head(h)));
  }
  CHECK_NOTHROW(meld.load(alike, 1));
  for (const index_t l : {0, 1}) {
    for (const index_t h : {0, 1}) {
      CHECK(same_head(kv.head(model_cache::of(l, 1).first + h),
                      kv.head(model_cache::of(l, 0).first + h)));
    }
    const one_row x;
    std::vector<float> out(kv_heads_of * group * dim);
    CHECK_NOTHROW(meld.step(model_cache::of(l, 1), {x.q, x.k, x.v}, out));
  }
}

TEST_CASE("heads of the same tokens: heads of a window are stepped one by one") {
  kvmeld::attention_spec full = layer_spec, cut = layer_spec;
  cut.window = 8;
  kvmeld::cache kv(std::vector{cut, full}, {.layers = 2, .requests = 2, .capacity = 40}),
      each(std::vector{cut, full}, {.layers = 2, .requests = 2, .capacity = 40});
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(16, 4)),
      apart(each, kvmeld::h2o{}, budget::same_tokens(16, 4));
  const std::vector<index_t> cut_heads{3, 0}, last{3}, first{0}, full_layer{4, 5};
  for (index_t step = 0; step < 60; ++step) {
    const std::vector<float> q = normal(4 * group * dim), k = normal(4 * dim);
    std::vector<float> out(q.size()), wanted(q.size());
    const auto part = [&](auto& with, std::vector<float>& to, const std::vector<index_t>& heads,
                          std::size_t from) {
      const std::size_t n = heads.size(), row = dim, rows = group * row;
      with.step(
          heads,
          {std::span(q).subspan(from * rows, n * rows), std::span(k).subspan(from * row, n * row),
           std::span(k).subspan(from * row, n * row)},
          std::span(to).subspan(from * rows, n * rows));
    };
    part(meld, out, cut_heads, 0), part(meld, out, full_layer, 2);
    part(apart, wanted, first, 1), part(apart, wanted, last, 0), part(apart, wanted, full_layer, 2);
    CHECK(out == wanted);
    CHECK(kv.head(4).length() == kv.head(5).length());
  }
  for (const index_t h : {0, 3, 4, 5}) {
    CHECK(same_head(kv.head(h), each.head(h)));
  }
}

TEST_CASE("heads of the same tokens: a request whose heads have come apart is not saved",
          "[errors]") {
  model_cache kv(40);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(16, 4));
  one_row x;
  x.k[dim] = std::numeric_limits<float>::quiet_NaN();  // of the second head
  std::vector<float> out(kv_heads_of * group * dim);
  CHECK_THROWS(meld.step(model_cache::of(0, 0), {x.q, x.k, x.v}, out));
  REQUIRE(kv.head(0).length() != kv.head(1).length());
  std::stringstream file;
  CHECK_THROWS_WITH(meld.save(file, 0), Catch::Contains("save: expected all heads of each layer"));
}

TEST_CASE("a saved request with a position that no token has is refused", "[errors]") {
  const index_t position = GENERATE(-5, tokens);
  model_cache kv(tokens + 4);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = slots});
  const prompt_rows prompt(tokens);
  read(meld, kv, prompt, 0, tokens), meld.end_prompt(0);
  kv.head(1).position(10) = position;
  std::stringstream file;
  meld.save(file, 0);
  CHECK_THROWS_WITH(meld.load(file, 1),
                    Catch::Contains("load: expected positions of 0 to 89, got"));
}

}  // namespace same_tokens_calls_test
