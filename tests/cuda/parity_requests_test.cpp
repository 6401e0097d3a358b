// SPDX-License-Identifier: MIT
// What a serving engine asks beside whole prompts and all heads at once: some heads only, pages of
// any size.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "kvmeld/cuda/state.cuh"

namespace kvmeld::cuda {
namespace parity_requests_test {

constexpr cache_case four{.heads = 4, .capacity = 41, .dim = 8, .group = 2};

/// A cache of four heads, its state, and a call's input and output for as many heads as it runs.
template <class Policy>
struct server {
  static constexpr index_t queries = 6;

  Policy policy;
  device_cache<float> kv;
  device_buffer<unsigned char> memory, work;
  state_view state;
  device_buffer<float> q, k, v, out, asked;
  uneven_budgets budgets;  // 20, 17, 14 and 11 slots

  explicit server(const Policy& p, index_t spare = 0)
      : policy(p),
        kv(with_spare(spare), {40, 12, 30, 41}, 5),
        memory(state_bytes(p, kv.view())),
        work(workspace_bytes(p, kv.view(), queries)),
        state(make_state_view(p, kv.view(), {memory.data(), memory.size()}, order())),
        q(number(four.group)),
        k(number(1)),
        v(number(1)),
        out(number(four.group)),
        asked(number(four.group) * queries),
        budgets({20}, 3, four.heads) {}

  static cache_case with_spare(index_t slots) {
    cache_case c = four;
    c.spare = slots;
    return c;
  }
  static std::size_t number(index_t rows) {
    return static_cast<std::size_t>(four.heads * rows * four.dim);
  }
  /// Place `i` of a call gets the numbers of head `heads[i]` at time `t`.
  void fill(const std::vector<index_t>& heads, index_t t) {
    const auto put = [&](device_buffer<float>& to, index_t rows, unsigned kind) {
      for (std::size_t i = 0; i < heads.size(); ++i) {
        emulator::chance random{static_cast<std::uint64_t>(heads[i] * 1000 + t) * 8 + kind};
        const auto n = static_cast<std::size_t>(rows * four.dim);
        for (std::size_t e = 0; e < n; ++e) {
          to.host()[i * n + e] = whole(random, 2);
        }
      }
    };
    put(q, four.group, 0), put(k, 1, 1), put(v, 1, 2), put(asked, four.group * queries, 3);
  }
  void step(const cache_view<float>& view) { step(view, budgets.limits()); }
  void step(const cache_view<float>& view, const head_budgets& limits) {
    policy_calls<Policy, float>::step(policy, view, state, q.data(), {k.data(), v.data()}, limits,
                                      out.data(), {work.data(), work.size()}, order());
  }
  void compress(const cache_view<float>& view) {
    const std::ptrdiff_t member = queries * four.dim;
    const query_rows<float> rows{asked.data(), queries, member * four.group, member, four.dim};
    policy_calls<Policy, float>::compress(policy, view, state, rows, budgets.limits(),
                                          {work.data(), work.size()}, order());
  }
  auto bytes() const {
    return std::vector{kv.keys.bytes(),     kv.values.bytes(), kv.log_mass.bytes(),
                       kv.position.bytes(), kv.length.bytes(), kv.next_position.bytes(),
                       memory.bytes()};
  }
  /// All that a call may change of the slots in use, head by head.
  std::vector<std::vector<float>> held() {
    std::vector<std::vector<float>> all;
    for (index_t h = 0; h < four.heads; ++h) {
      std::vector<float> x{static_cast<float>(kv.length[h]),
                           static_cast<float>(kv.next_position[h])};
      for (index_t s = 0; s < kv.length[h]; ++s) {
        x.insert(x.end(), kv.key(h, s), kv.key(h, s) + four.dim);
        x.insert(x.end(), kv.value(h, s), kv.value(h, s) + four.dim);
        x.push_back(kv.log_mass[kv.at(h, s)]);
        x.push_back(static_cast<float>(kv.position[kv.at(h, s)]));
        for (index_t c = 0; c < state.count; ++c) {
          x.push_back(on_host(state.column(c, h))[s]);
        }
      }
      const float* const floats = on_host(state.memory_of(h));
      for (index_t i = 0; i < state.floats; ++i) {  // integers among them may look like NaN
        x.push_back(floats[i] == floats[i] ? floats[i] : -1.0F);
      }
      all.push_back(x);
    }
    return all;
  }
};

/// LAW: heads that are run some at a time, in any order of the list, with places for none, of
/// arrays with more slots than calls use, get what they get all at once, each under its own budget.
template <class Policy>
void check_active(const Policy& p, index_t spare) {
  INFO(p.name());
  const std::vector<index_t> all{0, 1, 2, 3}, first{2, -1, 0}, second{1, 3, -1, -1};
  server<Policy> one(p), again(p, spare);
  device_buffer<index_t> of_first(first), of_second(second);
  const auto some = [&](const std::vector<index_t>& heads, device_buffer<index_t>& list) {
    return again.kv.view().with_active(list.data(), static_cast<index_t>(heads.size()));
  };
  const auto both = [&](index_t t, const auto& call) {
    one.fill(all, t), call(one, one.kv.view());
    bool same = true;
    for (const auto& [heads, list] : {std::pair(&first, &of_first), {&second, &of_second}}) {
      again.fill(*heads, t), call(again, some(*heads, *list));
      const std::size_t n = four.group * four.dim;
      for (std::size_t i = 0; i < heads->size(); ++i) {
        if ((*heads)[i] < 0) {  // no request
          continue;
        }
        const auto h = static_cast<std::size_t>((*heads)[i]);
        same = same && std::equal(again.out.host() + i * n, again.out.host() + (i + 1) * n,
                                  one.out.host() + h * n,
                                  [](float a, float b) { return a == b || (a != a && b != b); });
      }
    }
    return same;
  };
  both(0, [&](auto& s, const cache_view<float>& view) { s.compress(view); });
  CHECK(one.held() == again.held());
  CHECK((spare > 0 || one.bytes() == again.bytes()));
  for (index_t t = 1; t < 6; ++t) {
    CHECK(both(t, [&](auto& s, const cache_view<float>& view) { s.step(view); }));
  }
  CHECK(one.held() == again.held());
  CHECK((spare > 0 || one.bytes() == again.bytes()));

  const auto before = again.bytes();  // a request has ended, and none is left
  again.step(again.kv.view().with_active(of_first.data(), 0));
  CHECK(again.bytes() == before);
  again.kv.check_guards();
  CHECK((again.memory.intact() && again.work.intact() && again.out.intact()));
}

TEST_CASE("some heads at a time") {
  for (const index_t spare : {0, 9}) {
    check_active(h2o{}, spare);
    check_active(snapkv{.window = 6}, spare);
    check_active(zsmerge{.residual = 2}, spare);
    check_active(d2o{}, spare);
    check_active(keepkv{}, spare);
    check_active(kvmerger{}, spare);
    check_active(ems{.window = 6, .table = spare > 0 ? 20 : 0}, spare);
    check_active(fold{.recent = 4, .decode = {.queries = 4, .stride = 2}}, spare);
    check_active(fold{.recent = 4,
                      .decode = {.queries = 4, .stride = 2},
                      .pins = fold::pin_rule::scores,
                      .prompt_recent = 3},
                 spare);
  }
}

/// LAW: a step that is told that no head is due is the step.
template <class Policy>
void check_none_due(const Policy& p) {
  INFO(p.name());
  server<Policy> one(p), told(p);
  const head_budgets limits = budget{.slots = 20, .trigger = 31};
  index_t due_steps = 0;
  one.fill({0, 1, 2, 3}, 0), one.compress(one.kv.view());
  told.fill({0, 1, 2, 3}, 0), told.compress(told.kv.view());
  for (index_t t = 1; t < 26; ++t) {
    one.fill({0, 1, 2, 3}, t), told.fill({0, 1, 2, 3}, t);
    bool due = false;
    for (index_t h = 0; h < four.heads; ++h) {
      due = due || told.kv.length[h] + 1 >= 31;
    }
    due_steps += due ? 1 : 0;
    one.step(one.kv.view(), limits);
    told.step(told.kv.view(), due ? limits : limits.with_none_due());
    CHECK(one.out.bytes() == told.out.bytes());
  }
  CHECK(one.held() == told.held());
  CHECK((due_steps > 0 && due_steps < 10));
}

TEST_CASE("a step that is told that no head is due is the same") {
  check_none_due(h2o{});
  check_none_due(kvmerger{});
  check_none_due(fold{.recent = 4, .decode = {.queries = 4, .stride = 2}});
}

/// LAW: tokens that are accepted are so many steps, and others were never there.
template <class Policy>
void check_accepted(const Policy& p) {
  INFO(p.name());
  constexpr index_t tokens = 3;
  const std::vector<index_t> all{0, 1, 2, 3}, accepted{2, 0, 3, 1};
  server<Policy> one(p), again(p);
  for (server<Policy>* const x : {&one, &again}) {
    x->fill(all, 0), x->compress(x->kv.view());
  }
  device_buffer<float> q(tokens * one.q.size()), k(tokens * one.k.size()), v(k.size()),
      out(q.size(), 0);
  device_buffer<index_t> counts(accepted), list(all);
  for (std::size_t t = 0; t < tokens; ++t) {
    one.fill(all, static_cast<index_t>(t) + 1);
    std::copy_n(one.q.host(), one.q.size(), q.host() + t * one.q.size());
    std::copy_n(one.k.host(), one.k.size(), k.host() + t * one.k.size());
    std::copy_n(one.v.host(), one.v.size(), v.host() + t * one.v.size());
  }
  policy_calls<Policy, float>::accept(p, again.kv.view(), again.state, q.data(),
                                      {k.data(), v.data()}, tokens, counts.data(),
                                      again.budgets.limits(), out.data(), list.data(),
                                      {again.work.data(), again.work.size()}, order());
  bool same = true;
  for (index_t t = 0; t < tokens; ++t) {
    std::vector<index_t> some;
    std::copy_if(all.begin(), all.end(), std::back_inserter(some),
                 [&](index_t h) { return accepted[static_cast<std::size_t>(h)] > t; });
    device_buffer<index_t> of_some(some);
    one.fill(some, t + 1);
    const auto view = one.kv.view();
    one.step(view.with_active(of_some.data(), static_cast<index_t>(some.size())));
    const index_t n = four.group * four.dim;
    for (index_t i = 0; i < static_cast<index_t>(some.size()); ++i) {
      const float* const to = std::as_const(out).host() + (t * 4 + some[as_size(i)]) * n;
      same = same && std::equal(to, to + n, std::as_const(one.out).host() + i * n);
    }
  }
  CHECK(same);
  CHECK(one.held() == again.held());
  CHECK((list.intact() && out.intact() && again.work.intact()));
}

TEST_CASE("drafted tokens that are accepted are so many steps") {
  check_accepted(h2o{});
  check_accepted(d2o{});
  check_accepted(ems{.window = 6});
  check_accepted(fold{.recent = 4, .decode = {.queries = 4, .stride = 2}});
}

TEST_CASE("a list of more heads than there are is refused") {
  server<h2o> x(h2o{});
  device_buffer<index_t> list(std::vector<index_t>{0, 1, 2, 3, 0});
  CHECK_THROWS_WITH(x.step(x.kv.view().with_active(list.data(), 5)),
                    Catch::Contains("expected a list of 0 to 4 active heads, got 5"));
}

TEST_CASE("pages of any size") {
  for (const index_t page : {1, 3, 5, 12, 41, 100}) {
    INFO("pages of " << page << " slots");
    check_steps<float>(h2o{}, {.heads = 2, .capacity = 41, .dim = 8, .paged = true, .page = page},
                       30, {24, 37}, 20, data::integers, 1e-5, 401);
    check_compress<Eigen::half>(d2o{},
                                {.heads = 1, .dim = 40, .group = 4, .paged = true, .page = page},
                                {.length = 100, .queries = 33, .slots = 24}, 1e-3, 402);
  }
  for (const index_t n : {1, 2, 3, 5, 7, 12, 100, 641, 65535, 1 << 30, 0x7fffffff}) {
    const page_slots pages = n;
    bool same = true;
    for (const std::int64_t s :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{n} - 1, std::int64_t{n},
          std::int64_t{n} + 1, 7 * std::int64_t{n} - 1, 7 * std::int64_t{n},
          std::int64_t{0x7ffffffe}, std::int64_t{0x7fffffff}}) {
      if (s <= 0x7fffffff) {
        same = same && pages.page_of(static_cast<index_t>(s)) == static_cast<index_t>(s / n);
      }
    }
    CHECK(same);
  }
  device_cache<float> kv({.capacity = 40, .dim = 8, .paged = true}, {3, 3}, 1);
  auto view = kv.view();
  view.keys.pages = 9;
  CHECK_THROWS_WITH(check(view), Catch::Contains("expected pages for 40 slots, got 9 of 4 slots"));
}

}  // namespace parity_requests_test
}  // namespace kvmeld::cuda
