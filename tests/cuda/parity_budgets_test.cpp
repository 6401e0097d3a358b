// SPDX-License-Identifier: MIT
// Heads with budgets of their own in one call: each gets what the CPU's library gives it, in
// prompts and in the steps after them, however far apart the budgets are.
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
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda {
namespace parity_budgets_test {

constexpr index_t apart = 24;  // the last of three heads has a quarter of the first's

/// Prompts on exact numbers and on random ones, and steps that plan; then steps that remove one
/// slot. `exact`: as in `check_policy`.
template <class Policy>
void check_uneven(const Policy& p, std::uint64_t seed, bool exact = true) {
  check_compress<float>(p, {.heads = 3, .dim = 32},
                        {.length = 90,
                         .queries = 30,
                         .slots = 64,
                         .apart = apart,
                         .random = true,
                         .rounding = 2e-5F,
                         .steps = 3,
                         .again = 62},
                        1e-5, seed);
  check_compress<Eigen::half>(p, {.heads = 3, .dim = 40, .group = 4, .paged = true},
                              {.length = 90,
                               .queries = 30,
                               .slots = 16,
                               .apart = -30,  // the last has a target above its length
                               .random = !exact,
                               .shuffled = true,
                               .rounding = 2e-5F},
                              1e-3, seed + 1);
  check_steps<float>(p, {.heads = 3, .capacity = 65, .dim = 32, .group = 4}, 60, {64}, 20,
                     data::integers, 1e-5, seed + 2, apart);
  check_steps<float>(p, {.heads = 3, .capacity = 69, .dim = 32}, 64, {64, 68}, 12, data::random,
                     1e-5, seed + 3, apart);
}

TEST_CASE("budgets of heads: streaming_llm") { check_uneven(streaming_llm{}, 501); }
TEST_CASE("budgets of heads: h2o") { check_uneven(h2o{}, 511); }
TEST_CASE("budgets of heads: tova") { check_uneven(tova{}, 521); }
TEST_CASE("budgets of heads: snapkv") { check_uneven(snapkv{.window = 6}, 531); }
TEST_CASE("budgets of heads: zsmerge") { check_uneven(zsmerge{.residual = 3}, 541); }
TEST_CASE("budgets of heads: d2o") { check_uneven(d2o{}, 551); }
TEST_CASE("budgets of heads: keepkv") {
  check_uneven(keepkv{.similarity = 0.4F}, 561, false);
  check_uneven(keepkv{.similarity = 0.4F, .window = 8, .merge_first = false}, 566, false);
}
TEST_CASE("budgets of heads: kvmerger") { check_uneven(kvmerger{}, 571); }
TEST_CASE("budgets of heads: ems") {
  check_uneven(ems{.window = 6, .threshold = 0.1F}, 581, false);
}
TEST_CASE("budgets of heads: fold") {
  const fold p{.recent = 4, .decode = {.queries = 8}};
  check_uneven(p, 591, false);
  check_uneven(fold{.recent = 4,
                    .decode = {.queries = 8},
                    .pins = fold::pin_rule::scores,
                    .prompt_recent = 4},
               596, false);
}

TEST_CASE("budgets of heads that do not fit are refused") {
  device_cache<float> kv({.capacity = 40, .dim = 8}, {30, 30}, 1, {slot_reduce::sum});
  std::vector<budget> host{{20}, {30}};
  device_buffer<budget> device(host);
  const auto prompt = [&](const head_budgets& limits) {
    policy_calls<h2o, float>::compress({}, kv.view(), kv.state, {}, limits, {}, order());
  };
  const auto one_step = [&](const head_budgets& limits) {
    std::vector<float> x(64);
    policy_calls<h2o, float>::step({}, kv.view(), kv.state, x.data(), {x.data(), x.data()}, limits,
                                   x.data(), {}, order());
  };
  CHECK_THROWS_WITH(prompt({host, device.data()}), Catch::Contains("expected a workspace of"));
  CHECK_THROWS_WITH(prompt({host, nullptr}),
                    Catch::Contains("expected the budgets on the device too, got null"));
  CHECK_THROWS_WITH(prompt({std::span(host).first(1), device.data()}),
                    Catch::Contains("expected 2 budgets (one per head), got 1"));
  host[1].slots = 3;
  CHECK_THROWS_WITH(prompt({host, device.data()}),
                    Catch::Contains("expected h2o with a target of 8 to 40 slots, got 3"));
  host[1].slots = 41;
  CHECK_THROWS_WITH(prompt({host, device.data()}),
                    Catch::Contains("expected h2o with a target of 8 to 40 slots, got 41"));
  CHECK_THROWS_WITH(
      one_step({host, device.data()}),
      Catch::Contains("expected a target of 1 to 39 slots (one fewer than the capacity)"));
  host[1] = {.slots = 30, .trigger = 41};
  CHECK_THROWS_WITH(one_step({host, device.data()}),
                    Catch::Contains("expected a trigger of 31 to 40 slots, got 41"));
}

TEST_CASE("a target on the device beyond the host's is cut to the nearest of these") {
  device_cache<float> kv({.heads = 4, .capacity = 40, .dim = 8}, {40, 40, 40, 40}, 1, {});
  const std::vector<budget> host{{12}, {20}, {16}, {16}}, there{{2}, {38}, {16}, {1 << 30}};
  device_buffer<budget> device(there);
  device_buffer<unsigned char> work(workspace_bytes(streaming_llm{}, kv.view()));
  policy_calls<streaming_llm, float>::compress({}, kv.view(), kv.state, {},
                                               head_budgets(host, device.data()),
                                               {work.data(), work.size()}, order());
  CHECK((kv.length[0] == 12 && kv.length[1] == 20 && kv.length[2] == 16 && kv.length[3] == 20));
  CHECK((work.intact() && device.intact()));
}

}  // namespace parity_budgets_test
}  // namespace kvmeld::cuda
