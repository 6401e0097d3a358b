// SPDX-License-Identifier: MIT
/// A small serving engine: continuous batching over a pool of pages, as the tests call it.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/device_cache.hpp"
#include "cuda/policy_calls.hpp"
#include "kvmeld/cuda/state.cuh"
#include "kvmeld/cuda/view.cuh"

namespace kvmeld::cuda {

/// An event of the test's own.
struct count_event {
#ifdef __CUDACC__
  event of = [] {
    event made{};
    REQUIRE(cudaEventCreate(&made) == cudaSuccess);
    return made;
  }();
#else
  copied made;
  event of = &made;
  count_event() = default;
  count_event(const count_event&) = delete;
#endif
};

/// An engine of three requests, two of which run: a pool of pages, prompts of several lengths in
/// one call, and steps of whichever requests have a place, which is two heads of the cache. It
/// knows of lengths what `free_pages` has told it. A request that waits is in pages of the pool
/// alone, its rows and all else.
template <class Policy>
struct engine {
  static constexpr index_t requests = 3, places = 2, kv_heads = 2, group = 2, dim = 32, page = 4,
                           of_table = 16, in_pool = 44, row = kv_heads * dim,
                           heads = places * kv_heads, longest = 45, ahead = 3,
                           page_words = page * dim / 2;  // of a head, in a page of keys
  using calls = policy_calls<Policy, half>;
  struct request {
    index_t place = -1;
    index_t tokens = 0;
    std::vector<index_t> rows, saved;  // its pages of rows; of what else there is while it waits
    std::vector<float> out;
  };
  Policy policy;
  budget limit;
  device_buffer<half> keys, values;  // [pages, page, kv_heads, dim]
  device_buffer<index_t> table, saved_table, length, next_position, position, list, counts, indptr,
      words;
  device_buffer<float> log_mass;
  std::vector<index_t> pool;  // free pages
  std::vector<request> all = std::vector<request>(requests);
  index_t on_host[places] = {}, since = -1;  // steps since they were counted; −1: they are there
  count_event done;
  device_buffer<unsigned char> of_state, work;
  state_view state;

  engine(const Policy& p, const budget& b)
      : policy(p),
        limit(b),
        keys(std::size_t{in_pool} * page * row),
        values(keys.size()),
        table(std::size_t{places} * of_table),
        saved_table(table.size()),
        length(heads, 0),
        next_position(heads, 0),
        position(std::size_t{heads} * of_table * page),
        list(heads),
        counts(places),
        indptr(places + 1),
        words(heads),
        log_mass(position.size(), 0),
        of_state(state_bytes(p, view())),
        work(workspace_bytes(p, view(), longest)),
        state(make_state_view(p, view(), {of_state.data(), of_state.size()}, order())) {
    for (index_t i = 0; i < in_pool; ++i) {
      pool.push_back(i);
    }
  }

  cache_view<half> view() {
    const auto rows = [&](half* data) {
      return plane<half>{.data = data,
                         .head = dim,
                         .row = row,
                         .heads = kv_heads,
                         .table = table.data(),
                         .pages = of_table,
                         .slots = page,
                         .page = std::ptrdiff_t{page} * row};
    };
    return {rows(keys.data()),
            rows(values.data()),
            log_mass.data(),
            position.data(),
            length.data(),
            next_position.data(),
            heads,
            of_table * page,
            dim,
            group,
            0.25F};
  }
  /// Where a request is saved: a page of keys holds words of its heads, side by side.
  saved_pages saved_view() {
    return {.data = reinterpret_cast<std::uint32_t*>(keys.data()),
            .head = page_words,
            .row = 1,
            .heads = kv_heads,
            .table = saved_table.data(),
            .pages = of_table,
            .slots = page_words,
            .page = std::ptrdiff_t{page_words} * kv_heads};
  }
  request& of(index_t r) { return all[static_cast<std::size_t>(r)]; }
  /// Runs the heads of these requests, in a list with places for all.
  cache_view<half> running(const std::vector<index_t>& some) {
    for (index_t i = 0; i < heads; ++i) {
      const auto at = static_cast<std::size_t>(i / kv_heads);
      list[i] = at < some.size() ? of(some[at]).place * kv_heads + i % kv_heads : -1;
    }
    return view().with_active(list.data(), heads);
  }
  /// Makes `held` so many pages, of the pool's or back to it.
  void resize(std::vector<index_t>& held, index_t pages) {
    for (; held.size() < static_cast<std::size_t>(pages); pool.pop_back()) {
      REQUIRE(!pool.empty());
      held.push_back(pool.back());
    }
    for (; held.size() > static_cast<std::size_t>(pages); held.pop_back()) {
      pool.insert(pool.begin(), held.back());
    }
  }
  /// Line `i` of a table.
  static void name(device_buffer<index_t>& to, index_t i, const std::vector<index_t>& pages) {
    for (index_t p = 0; p < of_table; ++p) {
      const auto at = static_cast<std::size_t>(p);
      to[i * of_table + p] = at < pages.size() ? pages[at] : -1;
    }
  }
  void hold(index_t r, index_t pages) {
    resize(of(r).rows, pages);
    name(table, of(r).place, of(r).rows);
  }
  /// A place that no request has.
  index_t free_place() const {
    for (index_t i = 0; i < places; ++i) {
      if (std::none_of(all.begin(), all.end(), [&](const request& x) { return x.place == i; })) {
        return i;
      }
    }
    FAIL("no place is free");
    return -1;
  }
  /// Pages in use, as far as they have come; `must`: nothing goes on without them.
  void take_counts(bool must) {
    bool there = since >= 0 && is_done(done.of);
    while (since >= 0 && !there && (must || since == (ahead - 1) / 2)) {
      there = is_done(done.of);
    }
    for (index_t r = 0; r < requests && there; ++r) {
      if (of(r).place >= 0) {
        hold(r, on_host[of(r).place]);
      }
    }
    since = there ? -1 : since;
  }
  void count_pages() {
    if (since < 0) {
      free_pages(view(), ahead, counts.data(), on_host, done.of, order());
      since = 0;
    }
  }

  /// Numbers of a request's token: queries, keys or values.
  static void draw(half* to, index_t n, index_t r, index_t t, unsigned kind) {
    emulator::chance random{static_cast<std::uint64_t>((r * 100 + t) * 3) + kind + 1};
    for (index_t i = 0; i < n; ++i) {
      to[i] = from_float<half>(static_cast<float>(random.below(1U << 16)) / (1U << 15) - 1.0F);
    }
  }
  half* slot(device_buffer<half>& rows, index_t r, index_t s) {
    const index_t in = of(r).rows[static_cast<std::size_t>(s / page)];
    return rows.host() + (std::ptrdiff_t{in} * page + s % page) * row;
  }
  /// Prompts of requests, each of its own length, in one call.
  void prompt(const std::vector<std::pair<index_t, index_t>>& prompts) {
    take_counts(true);
    std::vector<index_t> who;
    device_buffer<half> q(std::size_t{places} * longest * row * group);
    indptr[0] = 0;
    for (const auto& [r, n] : prompts) {
      const auto i = static_cast<index_t>(who.size());
      of(r).place = free_place();
      hold(r, (n + page - 1) / page);
      for (index_t t = 0; t < n; ++t) {
        draw(q.host() + (indptr[i] + t) * row * group, row * group, r, t, 0);
        draw(slot(keys, r, t), row, r, t, 1), draw(slot(values, r, t), row, r, t, 2);
      }
      for (index_t h = of(r).place * kv_heads; h < (of(r).place + 1) * kv_heads; ++h) {
        length[h] = next_position[h] = n;
        for (index_t s = 0; s < n; ++s) {
          const index_t at = h * of_table * page + s;
          position[at] = s, log_mass[at] = 0;
        }
      }
      indptr[i + 1] = indptr[i] + n, of(r).tokens = n;
      who.push_back(r);
    }
    const auto some = running(who);
    const workspace memory{work.data(), work.size()};
    clear(state, some, order());
    calls::observe(policy, some, state,
                   {.data = q.data(),
                    .count = longest,
                    .head = group * dim,
                    .group = dim,
                    .row = row * group,
                    .indptr = indptr.data(),
                    .heads = kv_heads},
                   memory, order());
    calls::compress(policy, some, state, {}, limit, memory, order());
    count_pages(), take_counts(true);
  }
  /// A token of each.
  void step(const std::vector<index_t>& who) {
    take_counts(false);
    device_buffer<half> q(std::size_t{heads} * group * dim), k(std::size_t{heads} * dim),
        v(k.size()), x(q.size());
    for (std::size_t i = 0; i < who.size(); ++i) {
      const index_t r = who[i], t = of(r).tokens++;
      draw(q.host() + i * row * group, row * group, r, t, 0);
      draw(k.host() + i * row, row, r, t, 1), draw(v.host() + i * row, row, r, t, 2);
      for (index_t h = 0; h < kv_heads; ++h) {  // the engine does not know it
        REQUIRE(std::as_const(length)[of(r).place * kv_heads + h] <
                static_cast<index_t>(of(r).rows.size()) * page);
      }
    }
    const auto some = running(who);
    calls::step(policy, some, state, q.data(), {k.data(), v.data()}, limit, x.data(),
                {work.data(), work.size()}, order());
    for (std::size_t i = 0; i < who.size(); ++i) {
      for (std::ptrdiff_t e = 0; e < row * group; ++e) {
        of(who[i]).out.push_back(
            to_float(std::as_const(x)[static_cast<std::ptrdiff_t>(i) * row * group + e]));
      }
    }
    since += since < 0 ? 0 : 1;
    count_pages();
  }
  /// Words of a request's heads, saved or loaded.
  std::vector<index_t> words_of() const { return {words.host(), words.host() + kv_heads}; }
  /// Saves all but its rows, which stay where they are, and gives its place up.
  void preempt(index_t r) {
    take_counts(true);
    request& x = of(r);
    const auto pages = [](std::int64_t n) {
      return static_cast<index_t>((n + page_words - 1) / page_words);
    };
    resize(x.saved, pages(saved_words(state, static_cast<index_t>(x.rows.size()) * page)));
    name(saved_table, 0, x.saved);
    const auto some = running({r});
    save_to_pages(some, state, saved_view(), words.data(), order());
    const auto taken = words_of();
    REQUIRE(*std::min_element(taken.begin(), taken.end()) > 0);
    resize(x.saved, pages(*std::max_element(taken.begin(), taken.end())));
    x.place = -1;
  }
  /// Takes a place, any.
  void resume(index_t r) {
    take_counts(true);
    request& x = of(r);
    x.place = free_place();
    name(table, x.place, x.rows), name(saved_table, 0, x.saved);
    const auto some = running({r});
    load_from_pages(some, state, saved_view(), words.data(), order());
    const auto loaded = words_of();
    REQUIRE(*std::min_element(loaded.begin(), loaded.end()) > 0);
    resize(x.saved, 0);
    count_pages(), take_counts(true);
  }
  void end(index_t r) {
    take_counts(true);
    hold(r, 0), of(r).place = -1;
  }
};

}  // namespace kvmeld::cuda
