// SPDX-License-Identifier: MIT
// What a serving engine calls: steps of its own attention, budgets that change, pages to give back;
// and a small engine that does.
#include <catch2/catch.hpp>

#include "cuda/small_engine.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "kvmeld/cuda/state.cuh"
#include "kvmeld/cuda/view.cuh"

namespace kvmeld::cuda {
namespace parity_serving_test {

TEST_CASE("a step of an engine's own attention is the library's") {
  const cache_case c{.heads = 3, .capacity = 45, .dim = 36, .group = 5, .paged = true};
  const cache_case wide{.heads = 2, .capacity = 33, .dim = 8, .group = 16};
  const auto check = [&](const auto& p, const budget& limit) {
    const auto steps = [&](auto scalar, const cache_case& on, index_t prompt, double tolerance) {
      check_steps<decltype(scalar)>(p, on, prompt, limit, 14, data::integers, tolerance, 411, 1,
                                    attends::engine);
    };
    steps(float{}, c, 24, 1e-5);
    steps(float{}, wide, 20, 1e-5);
    steps(Eigen::half{}, c, 23, 1e-3);
    steps(Eigen::bfloat16{}, wide, 24, 1.6e-2);
  };
  check(streaming_llm{}, {24});
  check(h2o{}, {24});
  check(h2o{.combine = group_combine::max}, {24, 32});
  check(tova{}, {24});
  check(snapkv{.window = 6}, {24});
  check(zsmerge{.residual = 2}, {24});
  check(d2o{}, {24});
  check(keepkv{.similarity = 0.3F}, {24});
  check(kvmerger{}, {24, 32});
  check(fold{.recent = 4, .decode = {.queries = 4, .stride = 2}}, {24, 32});
  const cache_case split{.heads = 2, .capacity = 1101, .dim = 8, .group = 2};
  check_steps<float>(h2o{}, split, 1100, {1100}, 4, data::integers, 1e-5, 412, 300,
                     attends::engine);
  device_cache<float> kv(c, {24, 24, 24}, 1, {slot_reduce::sum});
  const auto columns = kv.columns.bytes();
  device_buffer<unsigned char> of_state(state_bytes(ems{}, kv.view())),
      work(workspace_bytes(ems{}, kv.view()));
  const auto tokens =
      make_state_view(ems{}, kv.view(), {of_state.data(), of_state.size()}, order());
  const float x = 0;
  CHECK_THROWS_WITH(
      (policy_calls<ems, float>::step({}, kv.view(), tokens, {&x, &x}, budget{.slots = 40},
                                      {work.data(), work.size()}, order())),
      "kvmeld: cuda step: expected a policy that observes an engine's own attention, got ems");
  CHECK_THROWS_WITH((policy_calls<h2o, float>::step({}, kv.view(), kv.state, {&x, nullptr},
                                                    budget{.slots = 20}, {}, order())),
                    Catch::Contains("expected queries and log_sum_exp of the engine's attention"));
  CHECK(kv.columns.bytes() == columns);
}

TEST_CASE("budgets that change from step to step, on the device alone") {
  const auto check = [](const auto& p, const budget& limit) {
    const cache_case c{.heads = 3, .capacity = 45, .dim = 8, .group = 2};
    policy_calls<std::decay_t<decltype(p)>, float>::check_steps(
        p, c, {24, limit, 30, data::integers, 1, attends::kernels, true}, 1e-5, 431);
  };
  check(h2o{}, {24, 32});
  check(zsmerge{.residual = 2}, {24, 32});
  check(kvmerger{}, {24, 30});
  device_cache<float> kv({.capacity = 41, .dim = 8}, {3, 3}, 1, {slot_reduce::sum});
  budget device;
  const float x = 0;
  const auto step = [&](const head_budgets& limits) {
    policy_calls<h2o, float>::step({}, kv.view(), kv.state, {&x, &x}, limits, {}, order());
  };
  CHECK_THROWS_WITH(step(head_budgets::within({20}, {41}, &device)),
                    Catch::Contains("expected a target of 1 to 40 slots"));
  CHECK_THROWS_WITH(step(head_budgets::within({20}, {19}, &device)),
                    Catch::Contains("expected targets within 20 to at least as many"));
  CHECK_THROWS_WITH(step(head_budgets::within({20}, {24}, nullptr)),
                    Catch::Contains("expected the budgets on the device too, got null"));
}

// Two tables for two heads each.
TEST_CASE("pages in use are counted, and come to the host when it asks") {
  for (const index_t page : {1, 3, 7, 16, 41}) {
    for (const index_t ahead : {0, 2, 60}) {
      device_cache<float> kv({.heads = 4, .capacity = 41, .dim = 8, .paged = true, .page = page},
                             {0, 30, 0, 0}, 1);
      device_buffer<index_t> counts(2);
      index_t host[2] = {-1, -1};
      count_event done;
      free_pages(kv.view(), ahead, counts.data(), host, done.of, order());
      while (!is_done(done.of)) {
#ifndef __CUDACC__
        CHECK(host[1] == -1);
#endif
      }
      const auto pages = [&](index_t n) {
        return std::min((n + ahead + page - 1) / page, kv.pages);
      };
      CHECK(host[0] == pages(30));
      CHECK(host[1] == pages(0));
      CHECK(counts.intact());
    }
  }
  device_cache<float> kv({.capacity = 40, .dim = 8, .paged = true}, {3, 3}, 1);
  auto view = kv.view();
  index_t count = 0;
  view.values.slots = 5;
  CHECK_THROWS_WITH(free_pages(view, 0, &count, &count, {}, order()),
                    Catch::Contains("keys and values in pages of one size, got others"));
}

/// LAW: a request that is served among others, in pages that change, and that waits in pages and
/// returns in another place, is to the bit what it is alone.
template <class Policy>
void check_engine(const Policy& p, const budget& limit) {
  INFO(p.name());
  using engine = engine<Policy>;
  const index_t lengths[] = {30, 22, 45}, steps[] = {11, 11, 12};
  const auto run = [](engine& e, const std::vector<index_t>& who, index_t count) {
    for (index_t t = 0; t < count; ++t) {
      e.step(who);
    }
  };
  engine all(p, limit);
  all.prompt({{0, 30}, {1, 22}});
  run(all, {0, 1}, 5);
  all.preempt(1);
  all.prompt({{2, 45}});
  run(all, {2, 0}, 6);
  CHECK(all.of(2).place == 1);
  all.end(0), all.resume(1);
  CHECK(all.of(1).place == 0);
  run(all, {2, 1}, 6);
  CHECK(all.pool.size() + all.of(1).rows.size() + all.of(2).rows.size() == all.in_pool);
  for (index_t r = 0; r < 3; ++r) {
    INFO("request " << r);
    engine alone(p, limit);
    alone.prompt({{r, lengths[r]}});
    run(alone, {r}, steps[r]);
    REQUIRE(all.of(r).out.size() == static_cast<std::size_t>(steps[r] * 4 * 32));
    CHECK((all.of(r).out == alone.of(r).out));
    if (r > 0) {  // what is saved is all there is
      all.preempt(r), alone.preempt(r);
      REQUIRE(all.words_of() == alone.words_of());
      const auto bytes = [r](engine& e) {
        std::vector<unsigned char> x;
        for (index_t h = 0; h < e.kv_heads; ++h) {
          const auto held = e.words_of()[static_cast<std::size_t>(h)];
          for (index_t i = 0; i < held; ++i) {
            const index_t in = e.of(r).saved[static_cast<std::size_t>(i / e.page_words)];
            const auto* const word = reinterpret_cast<const unsigned char*>(
                e.keys.host() +
                2 * ((std::ptrdiff_t{in} * e.kv_heads + h) * e.page_words + i % e.page_words));
            x.insert(x.end(), word, word + 4);
          }
        }
        return x;
      };
      CHECK((bytes(all) == bytes(alone)));
    }
  }
  CHECK((all.keys.intact() && all.values.intact() && all.table.intact() && all.work.intact()));
}

TEST_CASE("an engine of three requests, one of them preempted") {
  check_engine(streaming_llm{}, {20, 24});
  check_engine(h2o{}, {20});
  check_engine(tova{}, {20, 24});
  check_engine(snapkv{.window = 6}, {20, 24});
  check_engine(zsmerge{.residual = 2}, {20});
  check_engine(d2o{}, {20});
  check_engine(keepkv{}, {20, 24});
  check_engine(kvmerger{}, {20, 24});
  check_engine(ems{.window = 6}, {20});
  check_engine(fold{.recent = 4, .decode = {.queries = 4, .stride = 2}}, {20, 24});
}

}  // namespace parity_serving_test
}  // namespace kvmeld::cuda
