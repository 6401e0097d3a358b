// SPDX-License-Identifier: MIT
/// A small serving engine: continuous batching over a pool of pages, as the tests call it.
#pragma once

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

/// An engine of three requests: a pool of pages, prompts of several lengths in one call, and steps
/// of whichever requests run, in places for all. It knows of lengths what `free_pages` has told it.
template <class Policy>
struct engine {
  static constexpr index_t requests = 3, kv_heads = 2, group = 2, dim = 32, page = 4, of_table = 16,
                           in_pool = 21, row = kv_heads * dim, heads = requests * kv_heads,
                           longest = 45, ahead = 3;
  using calls = policy_calls<Policy, half>;
  Policy policy;
  budget limit;
  device_buffer<half> keys, values;  // [pages, page, kv_heads, dim]
  device_buffer<index_t> table, length, next_position, position, list, counts, indptr;
  device_buffer<float> log_mass;
  std::vector<index_t> pool,
      held = std::vector<index_t>(requests);   // free pages; pages of requests
  index_t on_host[requests] = {}, since = -1;  // steps since they were counted; −1: they are there
  index_t waiting = -1;                        // the request that waits
  std::vector<half> swapped;                   // K and V of a request that waits
  std::vector<std::vector<float>> out = std::vector<std::vector<float>>(requests);
  std::vector<index_t> tokens = std::vector<index_t>(requests);
  count_event done;
  device_buffer<unsigned char> of_state, work;
  state_view state;

  engine(const Policy& p, const budget& b)
      : policy(p),
        limit(b),
        keys(std::size_t{in_pool} * page * row),
        values(keys.size()),
        table(std::size_t{requests} * of_table),
        length(heads, 0),
        next_position(heads, 0),
        position(std::size_t{heads} * of_table * page),
        list(heads),
        counts(requests),
        indptr(requests + 1),
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
  /// Runs the heads of these requests, in a list with places for all.
  cache_view<half> running(const std::vector<index_t>& some) {
    for (index_t i = 0; i < heads; ++i) {
      const auto at = static_cast<std::size_t>(i / kv_heads);
      list[i] = at < some.size() ? some[at] * kv_heads + i % kv_heads : -1;
    }
    return view().with_active(list.data(), heads);
  }
  /// Gives a request so many pages, of the pool's or back to it.
  void hold(index_t r, index_t pages) {
    index_t& now = held[static_cast<std::size_t>(r)];
    for (; now < pages; ++now) {
      REQUIRE(!pool.empty());
      table[r * of_table + now] = pool.back(), pool.pop_back();
    }
    for (; now > pages; --now) {
      pool.insert(pool.begin(), table[r * of_table + now - 1]);
      table[r * of_table + now - 1] = -1;
    }
  }
  /// Pages in use, as far as they have come; `must`: nothing goes on without them.
  void take_counts(bool must) {
    bool there = since >= 0 && is_done(done.of);
    while (since >= 0 && !there && (must || since == (ahead - 1) / 2)) {
      there = is_done(done.of);
    }
    for (index_t r = 0; r < requests && there; ++r) {
      if (r != waiting) {
        hold(r, on_host[r]);
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
    return rows.host() + (std::ptrdiff_t{table[r * of_table + s / page]} * page + s % page) * row;
  }
  /// Prompts of requests, each of its own length, in one call.
  void prompt(const std::vector<std::pair<index_t, index_t>>& prompts) {
    take_counts(true);
    std::vector<index_t> who;
    device_buffer<half> q(std::size_t{requests} * longest * row * group);
    indptr[0] = 0;
    for (const auto& [r, n] : prompts) {
      const auto i = static_cast<index_t>(who.size());
      hold(r, (n + page - 1) / page);
      for (index_t t = 0; t < n; ++t) {
        draw(q.host() + (indptr[i] + t) * row * group, row * group, r, t, 0);
        draw(slot(keys, r, t), row, r, t, 1), draw(slot(values, r, t), row, r, t, 2);
      }
      for (index_t h = r * kv_heads; h < (r + 1) * kv_heads; ++h) {
        length[h] = next_position[h] = n;
        for (index_t s = 0; s < n; ++s) {
          position[h * of_table * page + s] = s;
        }
      }
      indptr[i + 1] = indptr[i] + n, tokens[static_cast<std::size_t>(r)] = n;
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
      const index_t r = who[i], t = tokens[static_cast<std::size_t>(r)]++;
      draw(q.host() + i * row * group, row * group, r, t, 0);
      draw(k.host() + i * row, row, r, t, 1), draw(v.host() + i * row, row, r, t, 2);
      for (index_t h = r * kv_heads; h < (r + 1) * kv_heads; ++h) {  // the engine does not know it
        REQUIRE(std::as_const(length)[h] < held[static_cast<std::size_t>(r)] * page);
      }
    }
    const auto some = running(who);
    calls::step(policy, some, state, q.data(), {k.data(), v.data()}, limit, x.data(),
                {work.data(), work.size()}, order());
    for (std::size_t i = 0; i < who.size(); ++i) {
      for (std::ptrdiff_t e = 0; e < row * group; ++e) {
        out[static_cast<std::size_t>(who[i])].push_back(
            to_float(std::as_const(x)[static_cast<std::ptrdiff_t>(i) * row * group + e]));
      }
    }
    since += since < 0 ? 0 : 1;
    count_pages();
  }
  /// Its rows leave for the host, and come back in other pages; all else stays where it is.
  void preempt(index_t r) {
    take_counts(true);
    const index_t slots = held[static_cast<std::size_t>(r)] * page;
    for (index_t s = 0; s < slots; ++s) {
      swapped.insert(swapped.end(), slot(keys, r, s), slot(keys, r, s) + row);
      swapped.insert(swapped.end(), slot(values, r, s), slot(values, r, s) + row);
    }
    hold(r, 0), waiting = r;
  }
  void resume() {
    take_counts(true);
    const auto slots = static_cast<index_t>(swapped.size()) / (2 * row);
    hold(waiting, slots / page);
    for (index_t s = 0; s < slots; ++s) {
      std::copy_n(swapped.begin() + 2 * s * row, row, slot(keys, waiting, s));
      std::copy_n(swapped.begin() + (2 * s + 1) * row, row, slot(values, waiting, s));
    }
    waiting = -1;
  }
};

}  // namespace kvmeld::cuda
