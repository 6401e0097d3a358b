// SPDX-License-Identifier: MIT
// Policies that merge, on rows of 8 bits: the library's slots and numbers on the device too, a
// merged row rounded once; and running means that do not stand still.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda {
namespace parity_narrow_test {

/// Prompts of several lengths with heads that are not due, dims of whole blocks and others.
template <class Scalar, class Policy>
void check_prompts(const Policy& p, std::uint64_t seed, index_t steps) {
  using calls = policy_calls<Policy, Scalar>;
  calls::check_compress(p, {.heads = 3, .dim = 64, .group = 3},
                        {.slots = 50, .apart = -10, .random = true, .steps = steps}, 1e-5, seed);
  calls::check_compress(p, {.heads = 2, .dim = 128, .group = 4, .paged = true},
                        {.slots = 24, .random = true, .shuffled = true, .steps = steps}, 1e-5,
                        seed + 1);
  calls::check_compress(p, {.heads = 1, .dim = 70, .odd = 6},
                        {.length = 300, .queries = 33, .slots = 40, .random = true}, 1e-5,
                        seed + 2);
}

template <class Scalar, class Policy>
void check_decode(const Policy& p, std::uint64_t seed, attends by = attends::engine) {
  using calls = policy_calls<Policy, Scalar>;
  calls::check_steps(p, {.heads = 2, .capacity = 33, .dim = 64, .group = 3},
                     {30, {32}, 12, data::integers, 2}, 1e-5, seed);
  calls::check_steps(p, {.heads = 2, .capacity = 41, .dim = 128, .group = 2, .paged = true},
                     {30, {32, 39}, 20, data::integers, 2, by}, 1e-5, seed + 1);
  calls::check_steps(p, {.heads = 2, .capacity = 33, .dim = 40, .group = 2, .odd = 12},
                     {30, {32}, 12, data::random, 0}, 1e-5, seed + 2);
}

TEST_CASE("rows in q8_0: zsmerge") {
  check_prompts<q8_0<float>>(zsmerge{}, 1, 4);
  check_prompts<q8_0<float>>(zsmerge{.residual = 3, .prompt = zsmerge::prompt_mode::nearest}, 11,
                             4);
  check_decode<q8_0<float>>(zsmerge{}, 21);
  check_decode<q8_0<float>>(zsmerge{.residual = 3, .sinks = 0, .new_token_competes = false}, 31);
}
TEST_CASE("rows in fp8: zsmerge") {  // its CPU twin rounds what it merges, and keeps no means
  check_prompts<fp8_e4m3<float>>(zsmerge{}, 41, 0);
  check_prompts<fp8_e4m3<float>>(zsmerge{.residual = 3, .prompt = zsmerge::prompt_mode::nearest},
                                 51, 0);
}
TEST_CASE("rows in q8_0: kvmerger") {
  check_prompts<q8_0<float>>(kvmerger{}, 61, 4);
  check_decode<q8_0<float>>(kvmerger{}, 71);
}
TEST_CASE("rows in fp8: kvmerger") {
  check_prompts<fp8_e4m3<float>>(kvmerger{}, 81, 4);
  check_decode<fp8_e4m3<float>>(kvmerger{}, 91);
}
TEST_CASE("rows in q8_0: d2o") {
  check_prompts<q8_0<float>>(d2o{}, 101, 4);
  check_decode<q8_0<float>>(d2o{}, 111);
}
TEST_CASE("rows in fp8: d2o") {
  check_prompts<fp8_e4m3<float>>(d2o{}, 121, 4);
  check_decode<fp8_e4m3<float>>(d2o{}, 131);
}
TEST_CASE("rows in q8_0: keepkv") {
  check_prompts<q8_0<float>>(keepkv{}, 141, 4);
  check_prompts<q8_0<float>>(keepkv{.merge_first = true}, 151, 0);
  check_decode<q8_0<float>>(keepkv{}, 161);
}
TEST_CASE("rows in fp8: keepkv") {
  check_prompts<fp8_e4m3<float>>(keepkv{}, 171, 4);
  check_decode<fp8_e4m3<float>>(keepkv{}, 181);
}

TEST_CASE("rows in q8_0: ems") {
  ems p{.window = 8, .threshold = 0.1F};
  check_prompts<q8_0<float>>(p, 221, 4);
  check_decode<q8_0<float>>(p, 231, attends::kernels);
  p.with_position = false;
  check_prompts<q8_0<float>>(p, 241, 0);
}
TEST_CASE("rows in fp8: ems") {
  check_prompts<fp8_e4m3<float>>(ems{.window = 8, .threshold = 0.1F}, 251, 4);
  check_decode<fp8_e4m3<float>>(ems{.window = 8, .threshold = 0.1F}, 261, attends::kernels);
}

/// A head of one token, one whose budget is its length, others; dims that are no whole block.
template <class Scalar>
void check_fold(const fold& p, std::uint64_t seed) {
  using calls = policy_calls<fold, Scalar>;
  prompt_case what{.queries = 40, .slots = 24, .random = true, .rounding = 2e-5F, .steps = 4};
  calls::check_compress(p, {.heads = 2, .dim = 32, .group = 2}, what, 1e-5, seed);
  what = {.length = 28, .queries = 1, .slots = 19, .random = true, .rounding = 2e-5F};
  calls::check_compress(p, {.heads = 4, .dim = 40, .group = 3, .paged = true, .odd = 6}, what, 1e-5,
                        seed + 1);
  const cache_case c{.heads = 2, .capacity = 30, .dim = 30, .group = 2, .odd = 2, .spare = 3};
  calls::check_steps(p, c, {20, {24, 29}, 16, data::integers, 2}, 1e-5, seed + 2);
}

TEST_CASE("rows in q8_0: fold") {
  fold p{.recent = 6, .decode = {.queries = 8}};
  check_fold<q8_0<float>>(p, 191);
  p.pins = fold::pin_rule::scores;
  check_fold<q8_0<float>>(p, 201);
}
TEST_CASE("rows in fp8: fold") {
  check_fold<fp8_e4m3<float>>({.recent = 6, .decode = {.queries = 8}}, 211);
}

/// A prompt of two heads, in rows that are widened for the plan; some of the last one's keys may be
/// NaN. What the first head has then.
template <class Policy>
std::vector<float> first_head(const Policy& p, bool nan) {
  using Scalar = q8_0<float>;
  const cache_case c{.heads = 2, .capacity = 43, .dim = 40, .group = 2};
  constexpr index_t tokens = 40, queries = 20;
  auto host = cache_of<host_scalar<Scalar>>(c);
  emulator::chance random{17};
  for (index_t h = 0; h < c.heads; ++h) {
    std::vector<float> k, v;
    for (index_t e = 0; e < tokens * c.dim; ++e) {
      k.push_back(number(random, data::random)), v.push_back(number(random, data::random));
    }
    for (index_t s = 0; s < tokens && nan && h == 1; s += 7) {
      k[static_cast<std::size_t>(s * c.dim)] = std::numeric_limits<float>::quiet_NaN();
    }
    host.append(h, k, v);
  }
  auto state = fixtures::make_state(p, host);
  for (index_t h = 0; h < c.heads; ++h) {
    state[h].extend(tokens);
  }
  mirror<host_scalar<Scalar>, Scalar> twin(p, host, state, c);
  auto& device = twin.device;
  const index_t member = queries * c.dim;
  device_buffer<float> q(static_cast<std::size_t>(c.heads * c.group * member));
  for (std::size_t e = 0; e < q.size(); ++e) {
    q.host()[e] = number(random, data::random);
  }
  fill_blocks(device.value(0, 0), c.dim, random);  // with codes that ours would not give it
  const std::vector<Scalar> sink(device.value(0, 0),
                                 device.value(0, 0) + row_elements<Scalar>(c.dim));
  device_buffer<unsigned char> memory(workspace_bytes(p, device.view(), queries));
  policy_calls<Policy, Scalar>::compress(p, device.view(), device.state,
                                         {q.data(), queries, c.group * member, member, c.dim},
                                         budget{24}, {memory.data(), memory.size()}, order(7));
  CHECK(memory.intact());
  REQUIRE((device.length[0] == 24 && device.length[1] == 24));
  const bool stays = std::same_as<Policy, fold>;  // it pins the sinks
  CHECK((!stays || std::memcmp(device.value(0, 0), sink.data(), sink.size()) == 0));
  std::vector<float> seen;
  for (index_t s = 0; s < device.length[0]; ++s) {
    seen.push_back(static_cast<float>(device.position[device.at(0, s)]));
    seen.push_back(device.log_mass[device.at(0, s)]);
    for (index_t i = 0; i < c.dim; ++i) {
      seen.push_back(number_at(device.key(0, s), c.dim, i));
      seen.push_back(number_at(device.value(0, s), c.dim, i));
    }
  }
  return seen;
}

TEST_CASE("rows in q8_0: a head whose keys are NaN has its slots, and leaves other heads alone") {
  const fold p{.recent = 6, .decode = {.queries = 8}};
  CHECK(first_head(p, true) == first_head(p, false));
  CHECK(first_head(ems{.window = 8}, true) == first_head(ems{.window = 8}, false));
}

/// LAW: after any number of merges a residual slot has the rounding of the mean of its tokens, as
/// these were stored: tokens about 1, then many about -1, which a rounded mean would not follow.
template <class Scalar>
void check_mean(std::uint64_t seed) {
  using host = host_scalar<Scalar>;
  const zsmerge policy;
  const cache_case c{.heads = 2, .capacity = 17, .dim = 40, .group = 2};
  const index_t tokens = 400, size = row_elements<Scalar>(c.dim);
  auto kv = cache_of<host>(c);
  mirror<host, Scalar> twin(policy, kv, fixtures::make_state(policy, kv), c);
  auto& device = twin.device;
  device_buffer<unsigned char> memory(workspace_bytes(policy, device.view()));
  const auto nk = static_cast<std::size_t>(c.heads * c.dim);
  device_buffer<float> q(2 * nk, 0), k(nk), v(nk), out(2 * nk);
  std::vector<float> seen;  // [tokens, 2, heads, dim] as they are stored
  emulator::chance random{seed};
  for (index_t t = 0; t < tokens; ++t) {
    for (device_buffer<float>* const x : {&k, &v}) {
      for (index_t h = 0; h < c.heads; ++h) {
        float* const row = x->host() + h * c.dim;
        for (index_t i = 0; i < c.dim; ++i) {
          row[i] = (t < tokens / 20 ? 1.0F : -1.0F) + 0.25F * number(random, data::random);
        }
        std::vector<Scalar> stored(static_cast<std::size_t>(size));
        write_row(stored.data(), static_cast<const float*>(row), c.dim);
        for (index_t i = 0; i < c.dim; ++i) {
          seen.push_back(number_at(stored.data(), c.dim, i));
        }
      }
    }
    policy_calls<zsmerge, Scalar>::step(
        policy, device.view(), device.state, q.data(), {k.data(), v.data()}, budget{16}, out.data(),
        {memory.data(), memory.size()}, order(seed + static_cast<std::uint64_t>(t)));
  }
  for (index_t h = 0; h < c.heads; ++h) {
    index_t residual = 0;
    std::vector<char> alone(static_cast<std::size_t>(tokens), 0);
    for (index_t s = 0; s < device.length[h]; ++s) {
      residual =
          device.log_mass[device.at(h, s)] > device.log_mass[device.at(h, residual)] ? s : residual;
    }
    for (index_t s = 0; s < device.length[h]; ++s) {
      alone[static_cast<std::size_t>(device.position[device.at(h, s)])] = s == residual ? 0 : 1;
    }
    double worst = 0;
    for (index_t plane = 0; plane < 2; ++plane) {
      const Scalar* const row = plane == 0 ? device.key(h, residual) : device.value(h, residual);
      for (index_t i = 0; i < c.dim; ++i) {
        double mean = 0;
        index_t merged = 0;
        for (index_t t = 0; t < tokens; ++t) {
          if (alone[static_cast<std::size_t>(t)] == 0) {
            mean +=
                double{seen[static_cast<std::size_t>(((t * 2 + plane) * c.heads + h) * c.dim + i)]};
            ++merged;
          }
        }
        REQUIRE(merged == tokens - 15);
        worst = worse(worst, std::abs(double{number_at(row, c.dim, i)} - mean / merged) /
                                 code_apart(row, c.dim, i));
      }
    }
    CHECK(worst <= 0.502);  // half of a code
  }
}

TEST_CASE("LAW: running means of narrow rows go where their tokens go") {
  check_mean<q8_0<float>>(101);
  check_mean<fp8_e4m3<float>>(102);
}

/// LAW: merged rows of fp8 are finite where their sums are. Keys whose first channel is 448, which
/// KeepKV scales by more than 1 where logits are negative: the sum leaves fp8.
TEST_CASE("LAW: keepkv's merged keys in fp8 are finite at the end of its range") {
  using Scalar = fp8_e4m3<float>;
  const keepkv policy;
  const cache_case c{.heads = 2, .capacity = 73, .dim = 40, .group = 1};
  auto host = cache_of<host_scalar<Scalar>>(c);
  emulator::chance random{7};
  constexpr index_t tokens = 70, queries = 16;
  for (index_t h = 0; h < c.heads; ++h) {
    std::vector<float> k, v;
    for (index_t e = 0; e < tokens * c.dim; ++e) {
      k.push_back(e % c.dim == 0 ? 448.0F : whole(random, 8));
      v.push_back(whole(random, 8));
    }
    host.append(h, k, v);
  }
  auto state = fixtures::make_state(policy, host);
  for (index_t h = 0; h < c.heads; ++h) {
    state[h].extend(tokens);
  }
  mirror<host_scalar<Scalar>, Scalar> twin(policy, host, state, c);
  auto& device = twin.device;
  const index_t row = c.heads * c.dim;
  device_buffer<float> q(static_cast<std::size_t>(queries * row));
  for (index_t e = 0; e < queries * row; ++e) {
    q[e] = e % c.dim == 0 ? -0.0625F : 0.125F * whole(random, 4);
  }
  device_buffer<unsigned char> memory(workspace_bytes(policy, device.view(), queries));
  policy_calls<keepkv, Scalar>::compress(policy, device.view(), device.state,
                                         {q.data(), queries, c.dim, c.dim, row, nullptr},
                                         budget{24}, {memory.data(), memory.size()}, order(7));
  bool finite = true;
  index_t merged = 0;
  for (index_t h = 0; h < c.heads; ++h) {
    REQUIRE(device.length[h] <= 24);
    for (index_t s = 0; s < device.length[h]; ++s) {
      merged += device.log_mass[device.at(h, s)] != 0 ? 1 : 0;
      for (index_t i = 0; i < c.dim; ++i) {
        finite = finite && std::isfinite(number_at(device.key(h, s), c.dim, i)) &&
                 std::isfinite(number_at(device.value(h, s), c.dim, i));
      }
    }
  }
  CHECK(finite);
  CHECK(merged > 0);
}

}  // namespace parity_narrow_test
}  // namespace kvmeld::cuda
