// SPDX-License-Identifier: MIT
// Heads on several threads: the same bits for any number of them. A program of its own, which
// ThreadSanitizer runs too.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/typed_cache.hpp"

namespace executor_test {

using kvmeld::index_t;

/// What an engine with threads of its own would hand over.
struct threads {
  index_t count = 1;

  index_t workers() const { return count; }
  template <class F>
  void operator()(index_t heads, F f) const {
    std::atomic<index_t> next = 0;
    std::vector<std::thread> all;
    for (index_t worker = 0; worker < count; ++worker) {
      all.emplace_back([&, worker] {
        for (index_t h; (h = next++) < heads;) {
          f(h, worker);
        }
      });
    }
    for (std::thread& t : all) {
      t.join();
    }
  }
};
static_assert(kvmeld::executor<threads>);

/// Any executor as one type, so that the policies are compiled once for all of them.
struct any_executor {
  index_t count;
  std::function<void(index_t, const std::function<void(index_t, index_t)>&)> run;

  template <kvmeld::executor E>
  explicit any_executor(const E& on)
      : count(on.workers()), run([on](index_t heads, const auto& f) { on(heads, std::ref(f)); }) {}

  index_t workers() const { return count; }
  template <class F>
  void operator()(index_t heads, F f) const {
    run(heads, std::ref(f));
  }
};
static_assert(kvmeld::executor<any_executor>);

std::vector<float> normal(std::size_t n, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> gauss;
  std::vector<float> x(n);
  for (float& e : x) {
    e = gauss(bits);
  }
  return x;
}

/// Three requests of two layers, each with a thread of its own or one after the other: what comes
/// out, and what is left. A thread reads a prompt, steps, drafts, and puts its request away and
/// back.
template <class Cache>
std::vector<std::vector<float>> served(Cache& kv, const kvmeld::any_policy_or_peer& policy,
                                       bool threaded) {
  constexpr index_t tokens = 48, steps = 10, drafted = 3;
  const index_t heads = kv.kv_heads(), group = kv.spec().group, dim = kv.spec().key_dim;
  const std::size_t query = static_cast<std::size_t>(heads * group * dim),
                    row = static_cast<std::size_t>(heads * dim);
  kvmeld::compressor meld(kv, policy, budget_within(policy, 40));
  std::vector<std::vector<float>> all(static_cast<std::size_t>(kv.requests()));
  const auto request = [&](index_t r) {
    auto& out = all[static_cast<std::size_t>(r)];
    unsigned seed = 100 * static_cast<unsigned>(r);
    const auto numbers = [&](std::size_t n) { return normal(n, ++seed); };
    for (index_t l = 0; l < kv.layers(); ++l) {
      const auto k = numbers(tokens * row), v = numbers(tokens * row), q = numbers(tokens * query);
      kv.append(kv.heads(l, r), k, v, tokens);
      meld.prompt(kv.heads(l, r), kvmeld::queries(q, tokens, kv.spec()));
    }
    meld.end_prompt(r);
    for (index_t t = 0; t < steps && kvmeld::declared(policy).supports_decode(); ++t) {
      for (index_t l = 0; l < kv.layers(); ++l) {
        const bool last = t == steps - 1;
        const std::size_t n = last ? drafted : 1;
        const auto q = numbers(n * query), k = numbers(n * row), v = numbers(n * row);
        std::vector<float> rows(n * query);
        if (last) {
          meld.draft(kv.heads(l, r), {q, k, v}, rows, drafted);
        } else {
          meld.step(kv.heads(l, r), {q, k, v}, rows);
        }
        out.insert(out.end(), rows.begin(), rows.end());
      }
    }
    meld.accept(r, kvmeld::declared(policy).supports_decode() ? 2 : 0);
    std::stringstream file;
    meld.save(file, r), meld.clear(r), meld.load(file, r);
    for (index_t l = 0; l < kv.layers(); ++l) {
      for (index_t i = 0; i < heads; ++i) {
        const kvmeld::head_ref head = kv.head(kv.heads(l, r)[i]);
        for (index_t s = 0; s < head.length(); ++s) {
          for (index_t e = 0; e < dim; ++e) {
            out.push_back(head.key(s)[e]), out.push_back(head.value(s)[e]);
          }
          out.push_back(head.log_mass(s)), out.push_back(static_cast<float>(head.position(s)));
        }
      }
    }
  };
  if (threaded) {
    threads{kv.requests()}(kv.requests(), [&](index_t r, index_t) { request(r); });
  } else {
    kvmeld::serial{}(kv.requests(), [&](index_t r, index_t) { request(r); });
  }
  return all;
}

/// A prompt of 160 tokens, compressed and decoded on: all that comes out, and all that is left.
std::vector<float> run(const kvmeld::any_policy_or_peer& policy, const any_executor& on) {
  constexpr index_t heads = 5, group = 2, dim = 16, tokens = 160, steps = 24;
  constexpr std::size_t row = heads * dim;
  fixtures::cache<float> kv{
      {.heads = heads, .group = group, .dim = dim, .capacity = tokens + steps}};
  for (index_t h = 0; h < heads; ++h) {
    kv.append(h, normal(tokens * dim, 10 + static_cast<unsigned>(h)),
              normal(tokens * dim, 20 + static_cast<unsigned>(h)));
  }
  kvmeld::compressor meld(kv, policy, budget_within(policy, 64));
  const auto all_heads = kv.heads(0, 0);
  const auto q = normal(tokens * row * group, 1), k = normal(steps * row, 2),
             v = normal(steps * row, 3);
  meld.prompt(all_heads, kvmeld::queries(q, tokens, kv.spec()), on);
  meld.end_prompt(0, on);
  std::vector<float> all, out(row * group);
  for (std::size_t t = 0; t < steps && kvmeld::declared(policy).supports_decode(); ++t) {
    meld.step(all_heads,
              {std::span(q).subspan(t * row * group, row * group),
               std::span(k).subspan(t * row, row), std::span(v).subspan(t * row, row)},
              out, on);
    all.insert(all.end(), out.begin(), out.end());
  }
  for (index_t h = 0; h < heads; ++h) {
    const auto head = kv.head(h);
    for (index_t s = 0; s < head.length(); ++s) {
      all.insert(all.end(), head.key(s).data, head.key(s).data + dim);
      all.insert(all.end(), head.value(s).data, head.value(s).data + dim);
      all.push_back(head.log_mass(s));
      all.push_back(static_cast<float>(head.position(s)));
    }
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_CASE("any number of threads gives the same bits", "[executor]") {
  for (const kvmeld::any_policy_or_peer& policy : kvmeld::any_policy_or_peer::every()) {
    const auto expected = run(policy, any_executor(kvmeld::serial{}));
    for (const index_t count : {1, 2, 3, 8}) {
      CAPTURE(policy.name(), count);
      CHECK(same_bits(run(policy, any_executor(threads{count})), expected));
#ifdef _OPENMP
      CHECK(same_bits(run(policy, any_executor(kvmeld::openmp{count})), expected));
#endif
    }
  }
}

TEST_CASE("requests that have a thread each give one thread's bits", "[executor]") {
  const kvmeld::attention_spec spec{.kv_heads = 2, .group = 2, .key_dim = 8};
  constexpr index_t layers = 2, requests = 3, slots = 8, pages = 8;
  for (const kvmeld::any_policy_or_peer& policy : kvmeld::any_policy_or_peer::every()) {
    CAPTURE(policy.name());
    const auto run = [&](bool threaded) {
      kvmeld::cache kv(spec, {.layers = layers, .requests = requests, .capacity = slots * pages});
      return served(kv, policy, threaded);
    };
    const auto in_pages = [&](bool threaded) {
      std::vector<float> keys(layers * requests * pages * slots * 2 * 8), values = keys;
      std::vector<index_t> table;
      for (index_t i = 0; i < requests * pages; ++i) {
        table.push_back(i % pages * requests + i / pages);  // a pool's, by turns
      }
      kvmeld::paged_cache kv(
          spec, {.layers = layers, .requests = requests, .capacity = slots * pages},
          kvmeld::rows(keys, kvmeld::layout::pages_nhd),
          kvmeld::rows(values, kvmeld::layout::pages_nhd), {.pages = table, .slots = slots});
      return served(kv, policy, threaded);
    };
    const auto expected = run(false);
    for (const auto& all : {run(true), in_pages(false), in_pages(true)}) {
      for (std::size_t r = 0; r < expected.size(); ++r) {
        CHECK(same_bits(all[r], expected[r]));
      }
    }
  }
}

TEST_CASE("threads may carry out one plan on caches of their own", "[executor][plan]") {
  constexpr index_t caches = 4, tokens = 200, dim = 4;
  kvmeld::merge_plan made;
  made.reset(tokens);
  for (index_t s = 0; s + 1 < tokens; s += 2) {
    made.add({s, 0.5F, 0.5F}), made.add({s + 1, 0.5F, 0.5F});
    made.end_row(0);
  }
  const kvmeld::merge_plan& plan = made;
  kvmeld::cache kv({.kv_heads = caches, .key_dim = dim}, {.capacity = tokens});
  for (index_t h = 0; h < caches; ++h) {
    kv.append(kvmeld::head_range{h, 1}, normal(tokens * dim, 1), normal(tokens * dim, 2), tokens);
  }
  std::atomic<index_t> arrived = 0;
  threads{caches}(caches, [&](index_t h, index_t) {
    ++arrived;
    while (arrived < caches) {  // all at once
      std::this_thread::yield();
    }
    apply(plan, kv.head(h));
  });
  for (index_t h = 0; h < caches; ++h) {
    REQUIRE(kv.head(h).length() == tokens / 2);
    CHECK(std::memcmp(kv.head(h).key(0).data, kv.head(0).key(0).data,
                      sizeof(float) * tokens / 2 * dim) == 0);
  }
}

#ifdef _OPENMP
TEST_CASE("what a head throws comes out when all are done", "[executor]") {
  std::atomic<int> done = 0;
  const auto work = [&](index_t i, index_t) {
    ++done;
    if (i == 3) {
      throw kvmeld::error(kvmeld::errc::unsupported, "head 3");
    }
  };
  CHECK_THROWS_WITH(kvmeld::openmp{2}(8, work), "head 3");
  CHECK(done == 8);
}
#endif

}  // namespace executor_test
