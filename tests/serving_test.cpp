// The server of docs/adopting.md: layers one after the other, requests that come, end, fork and are
// refused. Each request gets what it would have got alone, to the bit.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "kvmeld/compress.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "support/fixtures.hpp"

namespace {

constexpr int layers = 2, kv_heads = 2, group = 2, dim = 8, width = kv_heads * group * dim;
constexpr int capacity = 64;
const kvmeld::budget budget{.slots = 24};

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
      : model_(m),
        lanes_(lanes),
        kv_({.kv_heads = kv_heads, .group = group, .key_dim = dim},
            {.layers = layers, .requests = lanes, .capacity = capacity}) {}

  /// Part of a request's prompt: `x [tokens, width]`, which becomes the layers' output.
  void prompt(int lane, vector& x) {
    const auto tokens = static_cast<int>(x.size()) / width;
    for (int layer = 0; layer < layers; ++layer) {  // layer n + 1 needs what layer n has made
      vector queries;
      const kvmeld::head_range heads = heads_of(layer, lane);
      for (int t = 0; t < tokens; ++t) {
        float* const row = x.data() + t * width;
        const vector q = model_.project(layer, 0, row), k = model_.project(layer, 1, row),
                     v = model_.project(layer, 2, row);
        for (int h = 0; h < kv_heads; ++h) {
          const auto head = kv_.head(heads.first + h);
          head.push(k.data() + h * dim, v.data() + h * dim);  // no_capacity where it is full
          kvmeld::attend(head, q.data() + h * group * dim, row + h * group * dim);
        }
        extend(queries, q);
      }
      const auto reference = kvmeld::prompt_queries(queries.data(), tokens, kv_heads, group, dim);
      kvmeld::compress(policy_, kv_, state_, heads, reference, budget);
    }
  }

  /// One token of every active lane: `x [lanes, width]` becomes the layers' output.
  void step(const std::vector<int>& active, vector& x) {
    for (int layer = 0; layer < layers; ++layer) {
      vector q, k, v;
      std::vector<kvmeld::index_t> heads;
      for (std::size_t i = 0; i < active.size(); ++i) {
        const float* const row = x.data() + i * width;
        extend(q, model_.project(layer, 0, row));
        extend(k, model_.project(layer, 1, row));
        extend(v, model_.project(layer, 2, row));
        for (int h = 0; h < kv_heads; ++h) {
          heads.push_back(heads_of(layer, active[i]).first + h);
        }
      }
      kvmeld::step(policy_, kv_, state_, heads, {.q = q, .k = k, .v = v}, budget, x);
    }
  }

  /// A request ends, or was refused: its heads are free for another.
  void end(int lane) {
    each_head(lane, [&](kvmeld::index_t h) { kvmeld::clear(kv_, state_, h); });
  }
  /// `to` goes on from where `from` is.
  void fork(int from, int to) {
    const auto distance = static_cast<kvmeld::index_t>((to - from) * kv_heads);
    each_head(from, [&](kvmeld::index_t h) { kvmeld::copy(kv_, state_, h, h + distance); });
  }

 private:
  /// Heads lie as `[layer, lane, KV head]`.
  kvmeld::head_range heads_of(int layer, int lane) const {
    return {(layer * lanes_ + lane) * kv_heads, kv_heads};
  }
  template <class Use>
  void each_head(int lane, Use use) {
    for (int layer = 0; layer < layers; ++layer) {
      for (int h = 0; h < kv_heads; ++h) {
        use(heads_of(layer, lane).first + h);
      }
    }
  }

  const model& model_;
  int lanes_;
  kvmeld::zsmerge policy_{.residual = 2};
  kvmeld::cache kv_;
  kvmeld::state state_ = kvmeld::make_state(policy_, kv_);
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

}  // namespace

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
    CHECK_THAT(refused.what(), Catch::Contains("64"));
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
