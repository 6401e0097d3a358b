// SPDX-License-Identifier: MIT
// The device's decode step is the library's: the same slots leave, ties included, on numbers whose
// dot products are exact; and nearly always on random ones.
#include <catch2/catch.hpp>

#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/full_cache.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda {
namespace parity_step_test {

TEST_CASE("step: streaming_llm") { check_decode(streaming_llm{}, 24, 1); }
TEST_CASE("step: full_cache") {
  check_steps<float>(full_cache{}, {.capacity = 60, .dim = 32, .group = 2}, 20, {50}, 40,
                     data::integers, 1e-5, 5);
  for (std::uint64_t seed = 6; seed < 12; ++seed) {  // the last slot, outputs over two tiles
    check_steps<float>(full_cache{}, {.heads = 1, .capacity = 1026, .dim = 32, .group = 16}, 1024,
                       {1025}, 2, data::integers, 1e-5, seed);
  }
}
TEST_CASE("step: h2o") {
  check_decode(h2o{}, 32, 11);
  check_decode(h2o{.recent = 0.25F, .sinks = 0, .combine = group_combine::max}, 21, 21);
}
TEST_CASE("step: tova") {
  check_decode(tova{}, 24, 81);
  check_decode(tova{.sinks = 0, .combine = group_combine::mean}, 20, 86);
}
TEST_CASE("step: snapkv") { check_decode(snapkv{.window = 8}, 24, 31); }
TEST_CASE("step: zsmerge") {
  check_decode(zsmerge{}, 32, 41);
  check_decode(
      zsmerge{
          .residual = 3, .sinks = 0, .new_token_competes = false, .merged_score = slot_reduce::sum},
      24, 51);
}

TEST_CASE("step: soft caps and sinks") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    const cache_case c{.capacity = 33, .dim = 32, .group = 2, .soft_cap = 1.5F, .sinks = true};
    check_steps<float>(policy, c, 30, {32}, 12, data::integers, 1e-5, seed);
    check_steps<Eigen::half>(policy, c, 30, {24, 33}, 12, data::integers, 1e-3, seed + 1);
    check_steps<float>(policy, c, 30, {32}, 12, data::integers, 1e-5, seed + 2, 0, attends::engine);
  };
  check(streaming_llm{}, 201);
  check(h2o{}, 204);
  check(tova{.combine = group_combine::mean}, 207);
  check(snapkv{.window = 8}, 210);
  check(zsmerge{}, 213);
}

TEST_CASE("step: groups beyond a block's") {
  const cache_case c{.capacity = 33, .dim = 32, .group = 35};
  check_steps<float>(h2o{}, c, 30, {32}, 4, data::integers, 1e-5, 220);
  check_steps<Eigen::half>(h2o{}, c, 30, {32}, 4, data::integers, 1e-3, 221);
  check_steps<float>(h2o{}, c, 30, {32}, 4, data::integers, 1e-5, 222, 0, attends::engine);
  check_steps<float>(snapkv{.window = 8}, c, 30, {32}, 4, data::integers, 1e-5, 223);
}

TEST_CASE("step: several slots leave now and then") {
  const cache_case c{.heads = 3, .capacity = 41, .dim = 32, .group = 2};
  check_steps<float>(h2o{}, c, 30, {24, 37}, 40, data::integers, 1e-5, 71);
  check_steps<Eigen::half>(snapkv{.window = 8}, c, 40, {24, 41}, 30, data::integers, 1e-3, 72);
  check_steps<float>(streaming_llm{}, c, 0, {20, 30}, 60, data::integers, 1e-5, 73);
  check_steps<float>(zsmerge{.residual = 2}, c, 30, {24, 37}, 40, data::integers, 1e-5, 74);
}

TEST_CASE("step: one slot leaves of some heads, several of others") {
  const cache_case c{.heads = 3, .capacity = 41, .dim = 32, .group = 2};
  policy_calls<h2o, float>::check_steps(
      {}, c, {30, {24, 37}, 30, data::integers, 3, attends::kernels, false, true}, 1e-5, 75);
}

TEST_CASE("step: a long stream over several tiles and splits") {
  check_steps<float>(h2o{}, {.heads = 2, .capacity = 1101, .dim = 8, .group = 2}, 1100, {1100}, 6,
                     data::integers, 1e-5, 61);
}

TEST_CASE("step: 16 bits, heads that a block each attends and others") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    check_steps<Eigen::half>(policy, {.heads = 3, .capacity = 251, .dim = 96, .group = 7}, 250,
                             {250}, 12, data::integers, 1e-3, seed + 3);
    check_steps<Eigen::half>(policy, {.heads = 2, .capacity = 601, .dim = 32, .group = 5}, 600,
                             {600}, 12, data::integers, 1e-3, seed);
    check_steps<Eigen::bfloat16>(policy, {.heads = 1, .capacity = 301, .dim = 72, .group = 4}, 300,
                                 {300}, 12, data::integers, 1e-2, seed + 1);
    check_steps<Eigen::half>(policy, {.heads = 2, .capacity = 41, .dim = 32, .group = 12}, 40, {40},
                             12, data::integers, 1e-3, seed + 2);
  };
  check(streaming_llm{}, 91);
  check(h2o{}, 101);
  check(snapkv{.window = 8}, 111);
  check(zsmerge{.residual = 2}, 121);
}

// A thread asks for four slots at once: 2048 of a head's, or 512 where a block attends it whole.
TEST_CASE("step: more slots than a block asks for at once") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    check_steps<float>(policy, {.heads = 1, .capacity = 2301, .dim = 8, .group = 5}, 2300, {2300},
                       3, data::integers, 1e-5, seed);
    check_steps<Eigen::half>(policy, {.heads = 133, .capacity = 641, .dim = 8, .group = 5}, 640,
                             {640}, 2, data::integers, 1e-3, seed + 1);
  };
  check(h2o{}, 131);
  check(snapkv{.window = 8}, 141);
}

// A block's largest number is 2: codes times the scale, and their products, are exact.
TEST_CASE("step: rows in q8_0") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    const cache_case c{.heads = 2, .capacity = 25, .dim = 32, .group = 6};
    check_steps<kvmeld::q8_0>(policy, c, 22, {24}, 20, data::integers, 1e-5, seed);
    check_steps<kvmeld::q8_0>(policy, c, 22, {18, 24}, 20, data::integers, 1e-5, seed + 1, 2,
                              attends::engine);
    check_steps<kvmeld::q8_0>(
        policy, {.heads = 2, .capacity = 28, .dim = 40, .group = 4, .paged = true, .odd = 12}, 20,
        {18, 24}, 12, data::random, 1e-5, seed + 2);
  };
  check(streaming_llm{}, 151);
  check(h2o{}, 161);
  check(snapkv{.window = 4}, 171);
}

TEST_CASE("step: rows in fp8") {
  using calls = policy_calls<h2o, fp8_e4m3<float>>;
  const cache_case c{.heads = 2, .capacity = 33, .dim = 40, .group = 3};
  calls::check_steps({}, c, {30, {32}, 20, data::integers, 0}, 1e-5, 181);
  calls::check_steps({}, c, {30, {24, 32}, 20, data::integers, 2, attends::engine}, 1e-5, 182);
}

#ifdef __CUDACC__
TEST_CASE("step: captured in a graph") {
  const cache_case c{.heads = 2, .capacity = 33, .dim = 32, .group = 2};
  check_captured(streaming_llm{}, c, {32});
  check_captured(h2o{}, c, {24, 33});
  check_captured(zsmerge{}, c, {32});
}
#endif

TEST_CASE("step refuses what it cannot do") {
  device_cache<float> kv({.capacity = 9, .dim = 32}, {3, 3}, 1, {slot_reduce::sum});
  std::vector<float> x(64);
  const new_tokens<float> fresh{x.data(), x.data()};
  const auto step_with = [&]<class Policy>(const Policy& p, const budget& b) {
    policy_calls<Policy, float>::step(p, kv.view(), kv.state, x.data(), fresh, b, x.data(), {},
                                      order());
  };
  CHECK_THROWS_WITH(
      step_with(h2o{}, budget{.slots = 9}),
      Catch::Contains("expected a target of 1 to 8 slots (one fewer than the capacity), got 9"));
  CHECK_THROWS_WITH(step_with(h2o{}, budget{.slots = 4, .trigger = 10}),
                    Catch::Contains("expected a trigger of 5 to 9 slots, got 10"));
  CHECK_THROWS_WITH(step_with(h2o{}, budget{.slots = 7}),
                    Catch::Contains("expected h2o with a target of at least 8 slots, got 7"));
  CHECK_THROWS_WITH(step_with(h2o{.sinks = -1}, budget{.slots = 8}),
                    Catch::Contains("sinks in [0, 16777216], got -1"));
  CHECK_THROWS_WITH(step_with(streaming_llm{.positions = streaming_llm::position_mode::cache_index},
                              budget{.slots = 8}),
                    Catch::Contains("expected original positions, got cache_index"));
}

TEST_CASE("step: a head without room gives NaN and stays as it is") {
  device_cache<float> kv({.heads = 1, .capacity = 9, .dim = 32}, {9}, 1, {slot_reduce::sum});
  const auto keys = kv.keys.bytes(), columns = kv.columns.bytes();
  device_buffer<float> x(32, 0), out(32, 0);
  device_buffer<unsigned char> memory(workspace_bytes(h2o{}, kv.view()));
  policy_calls<h2o, float>::step({}, kv.view(), kv.state, x.data(), {x.data(), x.data()},
                                 budget{.slots = 8}, out.data(), {memory.data(), memory.size()},
                                 order());
  CHECK(out[0] != out[0]);
  CHECK(kv.keys.bytes() == keys);
  CHECK(kv.columns.bytes() == columns);
  CHECK(kv.length[0] == 9);
}

/// Of a policy that always plans: its plan is due, and carried out, for heads without room too.
/// The other head takes its token.
template <class Policy>
void check_full(const Policy& policy, const budget& limit) {
  const cache_case c{.heads = 2, .capacity = 41, .dim = 32, .group = 1};
  auto host = cache_of<float>(c);
  emulator::chance random{5};
  for (index_t h = 0; h < c.heads; ++h) {
    std::vector<float> k, v;
    for (index_t e = 0; e < (h == 0 ? c.capacity : 9) * c.dim; ++e) {
      k.push_back(whole(random, 4)), v.push_back(whole(random, 8));
    }
    host.append(h, k, v);
  }
  auto state = fixtures::make_state(policy, host);
  for (index_t h = 0; h < c.heads; ++h) {
    state[h].extend(host.head(h).length());
  }
  mirror<float> twin(policy, host, state, c);
  auto& kv = twin.device;
  device_buffer<float> x(64, 0), out(64, 0);
  device_buffer<unsigned char> memory(workspace_bytes(policy, kv.view()));
  policy_calls<Policy, float>::step(policy, kv.view(), kv.state, x.data(), {x.data(), x.data()},
                                    limit, out.data(), {memory.data(), memory.size()}, order(3));
  INFO(policy.name());
  CHECK(out[0] != out[0]);
  CHECK(out[32] == out[32]);
  CHECK(kv.length[0] == limit.slots);
  CHECK(kv.length[1] == 10);
  CHECK(kv.next_position[0] == c.capacity);
  CHECK(memory.intact());
  kv.check_guards();
}

TEST_CASE("step: a plan that is due frees slots of a head without room") {
  check_full(d2o{}, {.slots = 24});
  check_full(ems{}, {.slots = 38});
}

TEST_CASE("step: a head with more slots than the view's capacity is one without room") {
  for (const budget limit : {budget{.slots = 8}, budget{.slots = 8, .trigger = 10}}) {
    device_cache<float> kv({.heads = 2, .capacity = 400, .dim = 32}, {390, 8}, 1,
                           {slot_reduce::sum});
    const auto view = kv.view().with_capacity(10);
    const auto keys = kv.keys.bytes();
    device_buffer<float> x(64, 0), out(64, 0);
    device_buffer<unsigned char> memory(workspace_bytes(h2o{}, view));
    CHECK(memory.size() < workspace_bytes(h2o{}, kv.view()) / 10);
    policy_calls<h2o, float>::step({}, view, kv.state, x.data(), {x.data(), x.data()}, limit,
                                   out.data(), {memory.data(), memory.size()}, order());
    CHECK(out[0] != out[0]);
    CHECK(out[32] == out[32]);
    CHECK(std::equal(keys.begin(), keys.begin() + 400 * 32 * 4, kv.keys.bytes().begin()));
    CHECK(kv.length[0] == 390);
    CHECK(kv.length[1] == (limit.trigger > 0 ? 9 : 8));
    CHECK(memory.intact());
    kv.check_guards();
  }
  device_cache<float> kv({.heads = 1, .capacity = 9, .dim = 32}, {9}, 1);
  CHECK_THROWS_WITH(kv.view().with_capacity(10),
                    Catch::Contains("expected a capacity of 1 to 9 slots, got 10"));
}

}  // namespace parity_step_test
}  // namespace kvmeld::cuda
