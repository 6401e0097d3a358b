// SPDX-License-Identifier: MIT
// The server of docs/how-to/engine-integration.md: layers one after the other, requests that come,
// end, fork and are refused. Each request gets what it would have got alone, to the bit.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "support/fixtures.hpp"

namespace serving_test {

constexpr int layers = 2, kv_heads = 2, group = 2, dim = 8, width = kv_heads * group * dim;
constexpr int capacity = 64;
const kvmeld::attention_spec spec{.kv_heads = kv_heads, .group = group, .key_dim = dim};

using vector = std::vector<float>;

/// A model that is only projections: queries, keys and values of a layer, and its output.
struct model {
  std::vector<vector> weights;  // of every layer: q, k, v

  model() {
    for (int i = 0; i < 3 * layers; ++i) {
      weights.push_back(fixtures::normal(width * (i % 3 == 0 ? width : kv_heads * dim), 0.3F));
    }
  }
  vector project(int layer, int which, const float* x) const {
    const vector& w = weights[static_cast<std::size_t>(3 * layer + which)];
    vector y(w.size() / width);
    for (std::size_t i = 0; i < y.size(); ++i) {
      for (std::size_t j = 0; j < width; ++j) {
        y[i] += w[i * width + j] * x[j];
      }
    }
    return y;
  }
};

/// The next token's embedding, in place of sampling one; `turn` tells forks apart.
vector next_token(const float* x, int turn) {
  vector y(x, x + width);
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = std::tanh(2 * y[i]) + 0.3F * std::sin(static_cast<float>(i) + static_cast<float>(turn));
  }
  return y;
}

void extend(vector& all, const vector& more) { all.insert(all.end(), more.begin(), more.end()); }

// begin: the server
class server {
 public:
  server(const model& m, int lanes)
      : model_(m), kv_(spec, {.layers = layers, .requests = lanes, .capacity = capacity}) {}

  /// Part of a request's prompt: `x [tokens, width]`, which becomes the layers' output.
  void prompt(int lane, vector& x) {
    const auto tokens = static_cast<int>(x.size()) / width;
    for (int layer = 0; layer < layers; ++layer) {  // layer n + 1 needs what layer n has made
      const auto heads = kv_.heads(layer, lane);
      vector queries;
      for (int t = 0; t < tokens; ++t) {
        float* const row = x.data() + t * width;
        const vector q = model_.project(layer, 0, row), k = model_.project(layer, 1, row),
                     v = model_.project(layer, 2, row);
        kv_.append(heads, k, v, 1);  // no_capacity where a head is full
        for (int h = 0; h < kv_heads; ++h) {
          kvmeld::attend(kv_.head(heads[h]), q.data() + h * group * dim, row + h * group * dim);
        }
        extend(queries, q);
      }
      meld_.prompt(heads, kvmeld::queries(queries, tokens, spec));
      meld_.compress(heads);  // budgets are not shared: a layer need not wait for the others
    }
  }

  /// One token of every active lane: `x [lanes, width]` becomes the layers' output.
  void step(const std::vector<int>& active, vector& x) {
    for (int layer = 0; layer < layers; ++layer) {
      vector q, k, v;
      for (std::size_t i = 0; i < active.size(); ++i) {
        const float* const row = x.data() + i * width;
        extend(q, model_.project(layer, 0, row));
        extend(k, model_.project(layer, 1, row));
        extend(v, model_.project(layer, 2, row));
      }
      meld_.step(kv_.heads(layer, active), {.q = q, .k = k, .v = v}, x);
    }
  }

  /// A request ends, or was refused: its heads are free for another.
  void end(int lane) { meld_.clear(lane); }
  /// `to` goes on from where `from` is.
  void fork(int from, int to) { meld_.copy(from, to); }

 private:
  const model& model_;
  kvmeld::cache kv_;
  kvmeld::compressor<kvmeld::zsmerge> meld_{kv_, {.residual = 2}, {.slots = 24}};
};
// end: the server

/// A request in the server: its lane, its last output, and all that it got.
struct request {
  int lane = 0, turn = 0;
  vector last = {}, all = {};

  void take(const float* x) {
    last.assign(x, x + width);
    extend(all, last);
  }
  void prompt(server& s, const vector& tokens, int chunk) {
    for (std::size_t at = 0; at < tokens.size(); at += static_cast<std::size_t>(chunk) * width) {
      const auto end = std::min(tokens.size(), at + static_cast<std::size_t>(chunk) * width);
      vector x(tokens.begin() + static_cast<std::ptrdiff_t>(at),
               tokens.begin() + static_cast<std::ptrdiff_t>(end));
      s.prompt(lane, x);
      take(x.data() + x.size() - width);
    }
  }
};

void decode(server& s, std::vector<request*> batch, int steps) {
  for (int t = 0; t < steps; ++t) {
    vector x;
    std::vector<int> active;
    for (request* r : batch) {
      extend(x, next_token(r->last.data(), r->turn));
      active.push_back(r->lane);
    }
    s.step(active, x);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      batch[i]->take(x.data() + i * width);
    }
  }
}

TEST_CASE("a server's requests get what they would get alone", "[adopting]") {
  const model m;
  const auto tokens = [](int n) { return fixtures::normal(n * width); };
  const vector a = tokens(20), b = tokens(33), c = tokens(100), d = tokens(12);
  server s(m, 4);
  request first{0}, second{1}, third{2};
  first.prompt(s, a, 20);
  second.prompt(s, b, 33);
  try {  // more tokens than a head has slots
    third.prompt(s, c, 100);
    FAIL("a prompt that does not fit was taken");
  } catch (const kvmeld::error& refused) {
    CHECK(refused.code() == kvmeld::errc::no_capacity);
    CHECK_THAT(refused.what(), Catch::Contains("at most 0 tokens in head"));
    s.end(third.lane);
  }
  decode(s, {&first, &second}, 30);
  third.prompt(s, c, 40);  // again, in chunks: each is compressed before the next one comes
  decode(s, {&third, &first, &second}, 20);

  s.end(first.lane);
  request fourth{0};
  fourth.prompt(s, d, 12);
  s.fork(second.lane, 3);
  request forked = second;
  forked.lane = 3, forked.turn = 1;
  decode(s, {&second, &forked, &third, &fourth}, 40);
  CHECK(forked.all != second.all);

  const auto alone = [&](const vector& prompt, int chunk, int steps, int more, int turn) {
    server own(m, 1);
    request r{0};
    r.prompt(own, prompt, chunk);
    decode(own, {&r}, steps);
    r.turn = turn;
    decode(own, {&r}, more);
    return r.all;
  };
  CHECK(first.all == alone(a, 20, 50, 0, 0));
  CHECK(second.all == alone(b, 33, 50, 40, 0));
  CHECK(forked.all == alone(b, 33, 50, 40, 1));
  CHECK(third.all == alone(c, 40, 20, 40, 0));
  CHECK(fourth.all == alone(d, 12, 0, 40, 0));
}

TEST_CASE("two requests share a sealed prefix, and each is compressed behind it",
          "[adopting][seal]") {
  constexpr int slots = 4, pages = 12, prefix = 12, question = 30;
  const auto rows = [](int n) { return fixtures::normal(n * kv_heads * dim); };
  vector keys(layers * 2 * pages * slots * kv_heads * dim), values(keys);
  std::vector<kvmeld::index_t> table(2 * pages);
  std::iota(table.begin(), table.begin() + pages, 0);
  kvmeld::paged_cache kv(spec, {.layers = layers, .requests = 2, .capacity = pages * slots},
                         kvmeld::rows(keys, kvmeld::layout::pages_nhd),
                         kvmeld::rows(values, kvmeld::layout::pages_nhd),
                         {.pages = table, .slots = slots});
  kvmeld::compressor meld(kv, kvmeld::zsmerge{.residual = 2}, kvmeld::budget{.slots = 24});
  for (int layer = 0; layer < layers; ++layer) {
    kv.append(kv.heads(layer, 0), rows(prefix), rows(prefix), prefix);
  }
  const vector before(keys.begin(), keys.begin() + prefix * kv_heads * dim);

  meld.seal(0, prefix);  // whole pages: no call changes them from here on
  std::copy_n(table.begin(), prefix / slots, table.begin() + pages);  // request 1 lists them too,
  std::iota(table.begin() + pages + prefix / slots, table.end(), pages);  // then pages of its own
  meld.copy(0, 1);  // no row of the prefix is copied
  for (const int request : {0, 1}) {
    for (int layer = 0; layer < layers; ++layer) {
      const auto heads = kv.heads(layer, request);
      const vector q = fixtures::normal(question * width);
      kv.append(heads, rows(question), rows(question), question);
      meld.prompt(heads, kvmeld::queries(q, question, spec));
    }
    meld.end_prompt(request);  // 24 slots behind the prefix
  }

  CHECK(before == vector(keys.begin(), keys.begin() + prefix * kv_heads * dim));
  for (int h = 0; h < kv.heads(); ++h) {
    CHECK((kv.head(h).length() == prefix + 24 && meld.sealed(h) == prefix));
  }
  CHECK(kv.pages(0) == 9);
  CHECK(kv.head(0).key(0).data == kv.head(kv_heads).key(0).data);
}

}  // namespace serving_test
