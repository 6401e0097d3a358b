// SPDX-License-Identifier: MIT
// A model whose heads are split over processes: a shared budget is divided as in one.
#include <barrier>
#include <catch2/catch.hpp>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/kvmerger.hpp"
#include "support/fixtures.hpp"

namespace processes_test {

using Catch::Contains;
using fixtures::index_t;
using fixtures::normal;
using kvmeld::budget;

constexpr index_t layers = 3, heads = 4, group = 2, dim = 16, tokens = 120;

/// What stands in for the network: every process puts its message and reads those of all.
class network {
 public:
  explicit network(index_t processes)
      : messages_(static_cast<std::size_t>(processes)), all_(processes) {}
  std::vector<std::vector<float>> all_gather(index_t rank, std::span<const float> message) {
    messages_[static_cast<std::size_t>(rank)].assign(message.begin(), message.end());
    all_.arrive_and_wait();
    std::vector<std::vector<float>> result = messages_;
    all_.arrive_and_wait();
    return result;
  }

 private:
  std::vector<std::vector<float>> messages_;
  std::barrier<> all_;
};

/// A prompt of all heads; layers attend unlike one another.
struct prompt {
  std::vector<std::vector<float>> q, k, v;  // [layers][tokens, heads, ...]

  prompt() {
    for (index_t l = 0; l < layers; ++l) {
      q.push_back(normal(tokens * heads * group * dim)), k.push_back(normal(tokens * heads * dim));
      v.push_back(normal(tokens * heads * dim));
      for (std::size_t i = 0; i < q.back().size(); ++i) {
        q.back()[i] *= static_cast<float>(1 + l + static_cast<index_t>(i) / (group * dim) % heads);
      }
    }
  }
  /// Those of heads `first` to `first + count − 1`, of each token.
  static std::vector<float> cut(const std::vector<float>& x, index_t each, index_t first,
                                index_t count) {
    std::vector<float> own;
    for (index_t t = 0; t < tokens; ++t) {
      const auto begin = x.begin() + (std::ptrdiff_t{t} * heads + first) * each;
      own.insert(own.end(), begin, begin + std::ptrdiff_t{count} * each);
    }
    return own;
  }
};

/// A process with KV heads `first` to `first + count − 1` of every layer.
template <class P>
class process {
 public:
  process(const P& p, const budget& b, index_t first, index_t count)
      : first_(first),
        spec_{
            .kv_heads = count, .group = group, .key_dim = dim, .rope = kvmeld::rotary::halves(1e4)},
        kv_(spec_, {.layers = layers, .requests = 2, .capacity = tokens + 1}),
        meld_(kv_, p, b) {}

  void read(const prompt& x) {
    for (index_t l = 0; l < layers; ++l) {
      const auto i = static_cast<std::size_t>(l);
      const index_t n = spec_.kv_heads;
      kv_.append(kv_.heads(l, 0), prompt::cut(x.k[i], dim, first_, n),
                 prompt::cut(x.v[i], dim, first_, n), tokens);
      meld_.prompt(kv_.heads(l, 0),
                   kvmeld::queries(prompt::cut(x.q[i], group * dim, first_, n), tokens, spec_));
    }
  }
  void end_prompt() { meld_.end_prompt(0); }
  void end_prompt(index_t request, index_t rank, network& net) {
    const auto gather = [&](std::span<const float> message) {
      return net.all_gather(rank, message);
    };
    meld_.end_prompt(request, kvmeld::serial{}, {.rank = rank, .gather = gather});
  }
  index_t length(index_t layer, index_t h) {
    return kv_.head(kv_.heads(layer, 0)[h - first_]).length();
  }
  index_t first() const { return first_; }
  index_t count() const { return spec_.kv_heads; }

 private:
  index_t first_;
  kvmeld::attention_spec spec_;
  kvmeld::cache kv_;
  kvmeld::compressor<P> meld_;
};

template <class P>
void compare(const P& p, const budget& b, const std::vector<index_t>& split) {
  const prompt x;
  process<P> one(p, b, 0, heads);
  one.read(x), one.end_prompt();
  network net(static_cast<index_t>(split.size()));
  std::vector<std::unique_ptr<process<P>>> all;
  std::vector<std::thread> threads;
  index_t first = 0;
  for (const index_t n : split) {
    all.push_back(std::make_unique<process<P>>(p, b, first, n));
    first += n;
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    threads.emplace_back([&, r] {
      all[r]->read(x);
      all[r]->end_prompt(0, static_cast<index_t>(r), net);
    });
  }
  for (std::thread& t : threads) {
    t.join();
  }
  bool uneven = false;
  for (const auto& part : all) {
    for (index_t l = 0; l < layers; ++l) {
      for (index_t h = part->first(); h < part->first() + part->count(); ++h) {
        CAPTURE(l, h);
        CHECK(part->length(l, h) == one.length(l, h));
        uneven = uneven || one.length(l, h) != one.length(0, 0);
      }
    }
  }
  CHECK((uneven || !b.is_shared));
}

TEST_CASE("processes that have some heads each divide a shared budget as one does") {
  for (const auto& split : {std::vector<index_t>{2, 2}, {3, 1}, {1, 1, 2}, {4}}) {
    for (const budget& b : {budget::shared(40), budget::shared(40, 4, 55),
                            budget::shared_by_layer(40), budget{.slots = 40}}) {
      compare(kvmeld::h2o{}, b, split);
    }
    compare(kvmeld::fold{}, budget::shared(40), split);
    compare(kvmeld::kvmerger{}, budget::shared(40), split);
  }
}

TEST_CASE("processes: what cannot be divided so is refused") {
  const prompt x;
  kvmeld::attention_spec spec{.kv_heads = 2, .group = group, .key_dim = dim};
  const auto ends = [&](const auto& p, const budget& b, auto gather, index_t rank = 0) {
    kvmeld::cache kv(spec, {.layers = layers, .capacity = tokens + 1});
    kvmeld::compressor meld(kv, p, b);
    for (index_t l = 0; l < layers; ++l) {
      const auto i = static_cast<std::size_t>(l);
      kv.append(kv.heads(l, 0), prompt::cut(x.k[i], dim, 0, 2), prompt::cut(x.v[i], dim, 0, 2),
                tokens);
      meld.prompt(kv.heads(l, 0),
                  kvmeld::queries(prompt::cut(x.q[i], group * dim, 0, 2), tokens, spec));
    }
    meld.end_prompt(0, kvmeld::serial{}, kvmeld::process_group{rank, gather});
    return kv.head(0).length();
  };
  using message = std::vector<float>;
  const auto itself = [](std::span<const float> m) {
    return std::vector<message>{message(m.begin(), m.end())};
  };
  CHECK(ends(kvmeld::h2o{}, budget::shared(40), itself) > 0);
  CHECK_THROWS_WITH(ends(kvmeld::h2o{}, budget::same_tokens(40), itself), Contains("one process"));
  CHECK_THROWS_WITH(ends(kvmeld::h2o{}, budget::shared(40), itself, 1), Contains("at rank 1"));
  for (const message& other : {message{}, message{1}, message{2, 9, 9, 100, 1}, message{-1}}) {
    const auto two = [&](std::span<const float> m) {
      return std::vector<message>{message(m.begin(), m.end()), other};
    };
    CHECK_THROWS_WITH(ends(kvmeld::h2o{}, budget::shared(40), two), Contains("from rank 1"));
  }
}

}  // namespace processes_test
