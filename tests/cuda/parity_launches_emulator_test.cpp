// SPDX-License-Identifier: MIT
// How many launches a plan and a step take: the table "Launches and bytes" of cuda/INTERNALS.md.
#include <catch2/catch.hpp>

#include "cuda/device_cache.hpp"
#include "cuda/policy_calls.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "kvmeld/cuda/state.cuh"

namespace kvmeld::cuda {
namespace parity_launches_emulator_test {

/// `plan(rule, cache, state, budgets, memory, stream)`, by default the policy's of a step.
template <class Scalar = half, class Policy, class Plan>
index_t launches_of_plan(const Policy& policy, Plan plan) {
  device_cache<Scalar> kv({.heads = 2, .capacity = 40, .dim = 8}, {40, 33}, 1);
  const auto view = kv.view();
  device_buffer<unsigned char> state(state_bytes(policy, view));
  const auto columns = make_state_view(policy, view, {state.data(), state.size()}, order());
  const auto rule = detail::rule_of(policy, view);
  using plan_memory = typename detail::plan_memory_of<std::decay_t<decltype(rule)>>::type;
  plan_memory work;
  workspace_allocator count;
  work.allocate(count, rule, detail::shape_of(view));
  device_buffer<unsigned char> memory(count.used());
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, rule, detail::shape_of(view));
  const emulator::traffic counted;
  plan(rule, view, columns, head_budgets(budget{.slots = 24}), work, order());
  return counted.launches;
}
template <class Scalar = half, class Policy>
index_t launches_of_plan(const Policy& policy) {
  return launches_of_plan<Scalar>(
      policy, [](const auto&... call) { device_policy<Policy>::plan(call...); });
}

TEST_CASE("plans take as many launches as the guide says") {
  CHECK(launches_of_plan(h2o{}) == 2);
  CHECK(launches_of_plan(streaming_llm{}) == 2);
  CHECK(launches_of_plan<q8_0<half>>(h2o{}) == 2);  // nothing merges
  CHECK(launches_of_plan<fp8_e4m3<half>>(h2o{}) == 2);
  CHECK(launches_of_plan(zsmerge{}) == 6);
  CHECK(launches_of_plan(d2o{}) == 6);
  CHECK(launches_of_plan(keepkv{}) == 6);
  CHECK(launches_of_plan(kvmerger{}) == 7);
  CHECK(launches_of_plan(ems{}) == 7);
  CHECK(launches_of_plan<q8_0<half>>(ems{}) == 7 + 2);  // as fold
  CHECK(launches_of_plan(fold{}) == 16);
  CHECK(launches_of_plan<q8_0<half>>(fold{}) == 16 + 2);  // rows widen, and merge
  CHECK(launches_of_plan(fold{.pins = fold::pin_rule::scores}) == 17);
  const auto prompt = [](const auto&... call) { detail::merge_first(call...); };
  CHECK(launches_of_plan(keepkv{}, prompt) == 7 + 1);  // a tile of joiners
}

/// A step of heads that have room for its token alone.
template <class Scalar, class Policy>
index_t launches_of_step(const Policy& policy, const cache_case& c, const head_budgets& limit) {
  device_cache<Scalar> kv(
      c, std::vector<index_t>(static_cast<std::size_t>(c.heads), c.capacity - 1), 1);
  const auto view = kv.view();
  device_buffer<unsigned char> state(state_bytes(policy, view)),
      work(workspace_bytes(policy, view));
  const auto columns = make_state_view(policy, view, {state.data(), state.size()}, order());
  device_buffer<Scalar> q(static_cast<std::size_t>(c.heads * c.group * c.dim), 0), out(q.size());
  const emulator::traffic counted;
  policy_calls<Policy, Scalar>::step(policy, view, columns, q.data(), {q.data(), q.data()}, limit,
                                     out.data(), {work.data(), work.size()}, order());
  return counted.launches;
}

TEST_CASE("a step of heads that a block each attends takes one launch, of others two") {
  const cache_case whole{.heads = 2, .capacity = 65, .dim = 32, .group = 4};
  const cache_case split{.heads = 2, .capacity = 301, .dim = 32, .group = 4};
  const cache_case wide{.heads = 2, .capacity = 65, .dim = 32, .group = 12};
  const cache_case odd{.heads = 2, .capacity = 65, .dim = 30, .group = 4};
  const auto at = [](const cache_case& c) { return budget{.slots = c.capacity - 1}; };
  const auto check = [&](const auto& policy, index_t behind) {
    CHECK(launches_of_step<half>(policy, whole, at(whole)) == 1 + behind);
    CHECK(launches_of_step<half>(policy, split, at(split)) == 2 + behind);
    CHECK(launches_of_step<half>(policy, wide, at(wide)) == 2 + behind);
    CHECK(launches_of_step<half>(policy, odd, at(odd)) == 2 + behind);
    CHECK(launches_of_step<float>(policy, whole, at(whole)) == 2 + behind);
  };
  check(streaming_llm{}, 0);
  check(h2o{}, 0);
  check(zsmerge{}, 0);
  // Steps that make plans, and those of which the host knows that no head is due.
  const auto idle = [&](const cache_case& c) { return head_budgets(at(c)).with_none_due(); };
  const auto check_plans = [&](const auto& policy) {
    check(policy, launches_of_plan(policy));
    CHECK(launches_of_step<half>(policy, whole, idle(whole)) == 1);
    CHECK(launches_of_step<half>(policy, split, idle(split)) == 2);
  };
  check_plans(d2o{});
  check_plans(keepkv{});
  check_plans(ems{});
  check_plans(kvmerger{});
  CHECK(launches_of_step<half>(fold{}, whole, idle(whole)) == 1);
  CHECK(launches_of_step<half>(h2o{}, whole, idle(whole)) == 1);  // a slot leaves without a plan
}

TEST_CASE("a step of an engine's own attention takes two launches") {
  const cache_case c{.heads = 2, .capacity = 33, .dim = 32, .group = 4};
  device_cache<float> kv(c, {32, 32}, 1);
  const auto launches = [&](const auto& policy) {
    using calls = policy_calls<std::decay_t<decltype(policy)>, float>;
    device_buffer<unsigned char> of_state(state_bytes(policy, kv.view())),
        work(workspace_bytes(policy, kv.view()));
    const auto state =
        make_state_view(policy, kv.view(), {of_state.data(), of_state.size()}, order());
    device_buffer<float> q(std::size_t{2} * 4 * 32, 0);
    const emulator::traffic counted;
    calls::step(policy, kv.view(), state, {q.data(), q.data()}, budget{.slots = 32},
                {work.data(), work.size()}, order());
    return counted.launches;
  };
  CHECK(launches(streaming_llm{}) == 2);
  CHECK(launches(h2o{}) == 2);
  CHECK(launches(d2o{}) == 2 + launches_of_plan(d2o{}));
}

TEST_CASE("heads are saved in one launch, and loaded in one") {
  device_cache<float> kv({.heads = 2, .capacity = 33}, {32, 7}, 1, {slot_reduce::sum});
  device_buffer<std::uint32_t> pool(std::size_t{256});
  device_buffer<index_t> table(std::vector<index_t>{1, 0}), words(2);
  const saved_pages pages{.data = pool.data(),
                          .row = 1,
                          .heads = 1,
                          .table = table.data(),
                          .pages = 1,
                          .slots = 128,
                          .page = 128};
  const emulator::traffic counted;
  save_to_pages(kv.view(), kv.state, pages, words.data(), order());
  CHECK(counted.launches == 1);
  load_from_pages(kv.view(), kv.state, pages, words.data(), order());
  CHECK(counted.launches == 2);
  CHECK((words[0] == 3 + 32 * 3 && words[1] == 3 + 7 * 3));
}

/// Launches and blocks of a step of `view`'s heads, which hold 64 slots each, their target.
std::pair<index_t, std::int64_t> step_of(device_cache<half>& kv, const cache_view<half>& view) {
  for (index_t h = 0; h < view.heads; ++h) {
    kv.length[h] = 64;
  }
  device_buffer<unsigned char> state(state_bytes(h2o{}, view)), work(workspace_bytes(h2o{}, view));
  const auto columns = make_state_view(h2o{}, view, {state.data(), state.size()}, order());
  device_buffer<half> q(static_cast<std::size_t>(view.heads * view.group * view.dim), 0),
      out(q.size());
  const emulator::traffic counted;
  policy_calls<h2o, half>::step({}, view, columns, q.data(), {q.data(), q.data()},
                                budget{.slots = 64}, out.data(), {work.data(), work.size()},
                                order());
  return {counted.launches, counted.blocks};
}

TEST_CASE("a step launches blocks for the slots and the heads of its view alone") {
  const cache_case c{.heads = 8, .capacity = 2049, .dim = 32, .group = 4};
  device_cache<half> kv(c, std::vector<index_t>(8, 64), 1);
  device_buffer<index_t> one(std::vector<index_t>{5});
  const auto all = kv.view(), held = all.with_capacity(65);
  CHECK(step_of(kv, all) == std::pair(index_t{2}, std::int64_t{8 * 16 + 8}));
  CHECK(step_of(kv, held) == std::pair(index_t{1}, std::int64_t{8}));
  CHECK(step_of(kv, all.with_active(one.data(), 1)) == std::pair(index_t{2}, std::int64_t{16 + 1}));
  CHECK(step_of(kv, held.with_active(one.data(), 1)) == std::pair(index_t{1}, std::int64_t{1}));
  // As of 32 requests with 8 heads each in a layer, of 1,024 slots in arrays for 32,768: logits
  // and tickets alone.
  cache_view<half> layer = all;
  layer.heads = 256, layer.capacity = layer.slot_stride = 32768;
  const auto bytes = [](const cache_view<half>& x) {
    return static_cast<double>(workspace_bytes(x));
  };
  const double rows = 256.0 * 1024 * 2 * 32 * sizeof(half);  // K and V in use
  CHECK(bytes(layer) > 4 * rows);
  CHECK(bytes(layer.with_capacity(1025)) < 0.2 * rows);
}

}  // namespace parity_launches_emulator_test
}  // namespace kvmeld::cuda
