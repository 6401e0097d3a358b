// SPDX-License-Identifier: MIT
// Calls that the guide lets threads make at the same time, each for heads of its own of one layer
// and request, in memory of a cache's own and in pages. ThreadSanitizer runs it too.
#include <atomic>
#include <catch2/catch.hpp>
#include <numeric>
#include <thread>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/random.hpp"

namespace threads_test {

using kvmeld::budget, kvmeld::index_t;
using floats = std::vector<float>;

inline constexpr index_t layers = 2, heads = 4, group = 2, dim = 8, tokens = 24, slots = 2,
                         capacity = 40, per_table = capacity / slots;

floats numbers(index_t n, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> gauss;
  floats x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(bits);
  }
  return x;
}

/// Every thread's token begins when all have ended the one before, as an engine's layers do.
struct barrier {
  std::atomic<index_t> arrived{0};
  void wait(index_t round) {
    for (++arrived; arrived < heads * round;) {
      std::this_thread::yield();
    }
  }
};

/// What one head's thread does with request 0, and what it got.
template <class Cache>
floats head_of_request(Cache& kv, kvmeld::compressor<kvmeld::h2o>& meld, index_t k, barrier& all) {
  const kvmeld::attention_spec own{.kv_heads = 1, .group = group, .key_dim = dim};
  floats outputs;
  index_t round = 0;
  unsigned seed = 1000 * static_cast<unsigned>(k);
  const auto at = [&](index_t l) { return kvmeld::head_range{kv.heads(l, 0)[k], 1}; };
  const auto each_layer = [&](auto call) {
    for (index_t l = 0; l < layers; ++l) {
      all.wait(++round);
      call(at(l));
    }
  };
  each_layer([&](kvmeld::head_range h) {
    const floats rows = numbers(tokens * dim, ++seed);
    kv.append(h, rows, rows, tokens);
    meld.prompt(h, kvmeld::queries(numbers(tokens * group * dim, ++seed), tokens, own));
    meld.compress(h);
  });
  for (index_t t = 0; t < 12; ++t) {
    each_layer([&](kvmeld::head_range h) {
      floats q = numbers(group * dim, ++seed), out(q.size());
      const floats row = numbers(dim, ++seed);
      if (t % 3 < 2) {
        meld.step(h, {q, row, row}, out);
      } else {  // an engine's own attention
        kv.append(h, row, row, 1);
        const index_t n = kv.head(h.first).length();
        meld.observe(h, {.probabilities = floats(static_cast<std::size_t>(group * n), 0.1F)});
        meld.compress(h);
      }
      outputs.insert(outputs.end(), out.begin(), out.end());
    });
  }
  for (index_t round_of_drafts = 0; round_of_drafts < 2; ++round_of_drafts) {
    each_layer([&](kvmeld::head_range h) {
      floats q = numbers(3 * group * dim, ++seed), out(q.size());
      const floats row = numbers(3 * dim, ++seed);
      meld.draft(h, {q, row, row}, out, 3);
      outputs.insert(outputs.end(), out.begin(), out.end());
    });
    all.wait(++round);
    if (k == 0) {  // has the request to itself, until the others go on
      meld.accept(0, 2);
    }
    all.wait(++round);
  }
  return outputs;
}

template <class Cache>
floats served(Cache& kv) {
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = 16, .trigger = 20});
  std::vector<floats> out(heads);
  barrier all;
  std::vector<std::thread> running;
  const auto one = [&](index_t k) {
    out[static_cast<std::size_t>(k)] = head_of_request(kv, meld, k, all);
  };
  for (index_t k = 0; k < heads; ++k) {
    running.emplace_back(one, k);
  }
  for (std::thread& t : running) {
    t.join();
  }
  floats together;
  for (const floats& x : out) {
    together.insert(together.end(), x.begin(), x.end());
  }
  for (index_t h = 0; h < kv.heads(); ++h) {
    together.push_back(static_cast<float>(kv.head(h).length()));
  }
  return together;
}

struct threads {
  kvmeld::index_t count = 1;

  kvmeld::index_t workers() const { return count; }
  /// Calls `f(i, worker)` once for every `i` below `n`; no two calls at a time have one worker.
  /// What `f` throws is to come out of this call: a pool keeps it and throws it at the end.
  template <class F>
  void operator()(kvmeld::index_t n, F f) const {
    std::atomic<kvmeld::index_t> next = 0;
    std::vector<std::thread> all;
    for (kvmeld::index_t worker = 0; worker < count; ++worker) {
      all.emplace_back([&, worker] {
        for (kvmeld::index_t i; (i = next++) < n;) {
          f(i, worker);
        }
      });
    }
    for (std::thread& t : all) {
      t.join();
    }
  }
};
static_assert(kvmeld::executor<threads>);

TEST_CASE("a call on threads of the engine's own gives the bits of one thread", "[executor]") {
  const kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};
  const auto run = [&](const auto& on) {
    kvmeld::cache kv(spec, {.capacity = capacity});
    kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = 16});
    const auto all = kv.heads(0, 0);
    const floats rows = numbers(tokens * heads * dim, 1), q = numbers(heads * group * dim, 3);
    const floats queries = numbers(tokens * heads * group * dim, 2);
    kv.append(all, rows, rows, tokens);
    meld.prompt(all, kvmeld::queries(queries, tokens, spec), on), meld.end_prompt(0, on);
    floats out(q.size());
    const floats row = numbers(heads * dim, 4);
    meld.step(all, {q, row, row}, out, on);
    for (const index_t h : all) {
      out.push_back(kv.head(h).key(15)[0]);
    }
    return out;
  };
  CHECK(run(threads{3}) == run(kvmeld::serial{}));
}

TEST_CASE("threads call for a head each of one layer and request, in pages too", "[executor]") {
  const kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};
  kvmeld::cache kv(spec, {.layers = layers, .requests = 2, .capacity = capacity});
  const floats expected = served(kv);
  // One table for a request, one for each of its layers, one for each of its heads.
  for (const index_t each : {index_t{1}, layers, layers * heads}) {
    CAPTURE(each);
    const index_t tables = 2 * each, pages = tables * per_table;
    floats keys(static_cast<std::size_t>(layers * pages * slots * heads * dim)), values = keys;
    std::vector<index_t> table(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    kvmeld::paged_cache paged(spec, {.layers = layers, .requests = 2, .capacity = capacity},
                              kvmeld::rows(keys, kvmeld::layout::pages_nhd),
                              kvmeld::rows(values, kvmeld::layout::pages_nhd),
                              {.pages = table, .slots = slots});
    for (int run = 0; run < 8; ++run) {
      CHECK(served(paged) == expected);
      // Each page was counted once: after the request has ended, none is in use.
      for (index_t h = 0; h < paged.heads(); ++h) {
        paged.head(h).restore(0, 0);
      }
      for (index_t h = 0; h < paged.heads(); ++h) {
        CHECK(paged.pages(h) == 0);
      }
    }
  }
}

}  // namespace threads_test
