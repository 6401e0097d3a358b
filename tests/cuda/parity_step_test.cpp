// The device's decode step is the library's: the same slots leave, ties included, on numbers whose
// dot products are exact; and nearly always on random ones.
#include <catch2/catch.hpp>

#include "cuda/mirror.hpp"
#include "kvfold/cuda/step.cuh"
#include "kvfold/policies/full_cache.hpp"
#include "kvfold/policies/h2o.hpp"
#include "kvfold/policies/snapkv.hpp"
#include "kvfold/policies/streaming_llm.hpp"
#include "kvfold/policies/zsmerge.hpp"

namespace kvfold::cuda {
namespace {

enum class data { integers, random };

float number(emulator::chance& random, data kind) {
  return kind == data::integers
             ? whole(random, 2)
             : static_cast<float>(random.below(1U << 20)) / static_cast<float>(1U << 19) - 1.0F;
}

/// `steps` of decoding from a prompt of `prompt` tokens (per head one less), both ways.
template <class Scalar, class Policy>
void check_steps(const Policy& p, cache_case c, index_t prompt, const budget& limit, index_t steps,
                 data kind, double tolerance, std::uint64_t seed) {
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group << ", prompt " << prompt
                << ", target " << limit.target << ", seed " << seed);
  emulator::chance random{seed};
  cache<Scalar> kv{
      {.heads = c.heads, .group = c.group, .dim = c.dim, .capacity = c.capacity, .scale = c.scale}};
  auto state = make_state(p, kv);
  const auto scalars = [&](index_t n) {
    std::vector<Scalar> x(static_cast<std::size_t>(n));
    for (Scalar& e : x) {
      e = static_cast<Scalar>(number(random, kind));
    }
    return x;
  };
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = std::max(prompt - h, index_t{0});
    const auto k = scalars(n * c.dim), v = scalars(n * c.dim);
    kv.append(h, k, v);
    state[h].extend(n);
    for (index_t k0 = 0; k0 < state[h].columns() && k0 < 1; ++k0) {  // scores, many of them tied
      for (float& x : state[h].column(k0)) {
        x = static_cast<float>(random.below(3));
      }
    }
  }
  for (index_t h = 0; h < c.heads; ++h) {  // as `compress` leaves it
    traits::settle(p, kv.head(h), state[h], limit.target);
  }
  using scalar = typename mirror<Scalar>::scalar;
  mirror<Scalar> twin(p, kv, state, c);
  device_buffer<unsigned char> memory(workspace_bytes(p, twin.device.view()), 0);
  const auto nq = c.heads * c.group * c.dim, nk = c.heads * c.dim;
  device_buffer<scalar> q(static_cast<std::size_t>(nq)), k(static_cast<std::size_t>(nk)),
      v(static_cast<std::size_t>(nk)), out(static_cast<std::size_t>(nq));
  std::vector<float> fq(q.size()), fk(k.size()), fv(v.size()), fout(q.size());
  double agreed = 1, worst = 0;
  for (index_t step = 0; step < steps; ++step) {
    const auto fill = [&](std::vector<float>& to, device_buffer<scalar>& device, float scale) {
      for (std::size_t i = 0; i < to.size(); ++i) {
        device.data()[i] = from_float<scalar>(scale * number(random, kind));
        to[i] = to_float(device.data()[i]);
      }
    };
    fill(fq, q, step % 5 == 3 ? 0.0F : 1.0F), fill(fk, k, 1), fill(fv, v, 1);
    kvfold::step(p, kv, state, fq, fk, fv, limit, fout);
    cuda::step(p, twin.device.view(), twin.device.state, q.data(),
               newcomers<scalar>{k.data(), v.data()}, limit, out.data(),
               {memory.data(), memory.size()}, stream{seed + static_cast<std::uint64_t>(step)});
    if (kind == data::integers) {
      INFO("step " << step);
      twin.check_same(kv, state, tolerance);
    }
    agreed = std::min(agreed, twin.jaccard(kv));
    for (std::size_t i = 0; i < fout.size(); ++i) {
      const double x = double{fout[i]};
      worst = worse(worst, std::abs(double{to_float(out.data()[i])} - x) / (std::abs(x) + 1));
    }
  }
  CHECK(agreed >= 0.999);
  CHECK(worst <= tolerance);
  CHECK((memory.intact() && out.intact()));
}

template <class Policy>
void check_policy(const Policy& p, index_t target, std::uint64_t seed) {
  const cache_case c{.heads = 2, .capacity = target + 1, .dim = 32, .group = 2};
  check_steps<float>(p, c, target + 1 - 2, {target}, 40, data::integers, 1e-5, seed);
  check_steps<float>(p, c, 0, {target}, target + 20, data::integers, 1e-5, seed + 1);
  auto paged = c;
  paged.paged = true, paged.group = 4, paged.dim = 40, paged.capacity = target + 4;
  check_steps<Eigen::half>(p, paged, target, {target}, 20, data::integers, 2e-3, seed + 2);
  check_steps<Eigen::bfloat16>(p, paged, target, {target}, 20, data::integers, 1.6e-2, seed + 3);
  check_steps<float>(p, c, target, {target}, 60, data::random, 1e-5, seed + 4);
}

TEST_CASE("step: streaming_llm") { check_policy(streaming_llm{}, 24, 1); }
TEST_CASE("step: full_cache") {
  check_steps<float>(full_cache{}, {.capacity = 60, .dim = 32, .group = 2}, 20, {50}, 40,
                     data::integers, 1e-5, 5);
  for (std::uint64_t seed = 6; seed < 12; ++seed) {  // the last slot, outputs over two tiles
    check_steps<float>(full_cache{}, {.heads = 1, .capacity = 1026, .dim = 32, .group = 16}, 1024,
                       {1025}, 2, data::integers, 1e-5, seed);
  }
}
TEST_CASE("step: h2o") {
  check_policy(h2o{}, 32, 11);
  check_policy(h2o{.recent = 0.25F, .sinks = 0, .combine = group_combine::max}, 21, 21);
}
TEST_CASE("step: snapkv") { check_policy(snapkv{.window = 8}, 24, 31); }
TEST_CASE("step: zsmerge") {
  check_policy(zsmerge{}, 32, 41);
  check_policy(
      zsmerge{
          .residual = 3, .sinks = 0, .newcomer_competes = false, .merged_score = column_fold::sum},
      24, 51);
}

TEST_CASE("step: several slots leave now and then") {
  const cache_case c{.heads = 3, .capacity = 41, .dim = 32, .group = 2};
  check_steps<float>(h2o{}, c, 30, {24, 37}, 40, data::integers, 1e-5, 71);
  check_steps<Eigen::half>(snapkv{.window = 8}, c, 40, {24, 41}, 30, data::integers, 2e-3, 72);
  check_steps<float>(streaming_llm{}, c, 0, {20, 30}, 60, data::integers, 1e-5, 73);
  check_steps<float>(zsmerge{.residual = 2}, c, 30, {24, 37}, 40, data::integers, 1e-5, 74);
}

TEST_CASE("step: a long stream over several tiles and splits") {
  check_steps<float>(h2o{}, {.heads = 2, .capacity = 1101, .dim = 8, .group = 2}, 1100, {1100}, 6,
                     data::integers, 1e-5, 61);
}

TEST_CASE("step refuses what it cannot do") {
  device_cache<float> kv({.capacity = 9, .dim = 32}, {3, 3}, 1, {column_fold::sum});
  std::vector<float> x(64);
  const newcomers<float> fresh{x.data(), x.data()};
  const auto step_with = [&](const auto& p, const budget& b) {
    cuda::step(p, kv.view(), kv.state, x.data(), fresh, b, x.data(), {}, stream{});
  };
  CHECK_THROWS_WITH(step_with(h2o{}, budget{.target = 9}),
                    Catch::Contains("a target of 1 to 8 expected (room for the newcomer), 9 came"));
  CHECK_THROWS_WITH(step_with(h2o{}, budget{.target = 4, .trigger = 10}),
                    Catch::Contains("a trigger of 5 to 9 expected, 10 came"));
  CHECK_THROWS_WITH(step_with(streaming_llm{.positions = streaming_llm::position_mode::cache_index},
                              budget{.target = 8}),
                    Catch::Contains("original positions expected, cache_index came"));
}

TEST_CASE("step: a head without room gives NaN and stays as it is") {
  device_cache<float> kv({.heads = 1, .capacity = 9, .dim = 32}, {9}, 1, {column_fold::sum});
  const auto keys = kv.keys.bytes();
  std::vector<float> x(32), out(32);
  device_buffer<unsigned char> memory(workspace_bytes(h2o{}, kv.view()), 0);
  cuda::step(h2o{}, kv.view(), kv.state, x.data(), newcomers<float>{x.data(), x.data()},
             budget{.target = 7}, out.data(), {memory.data(), memory.size()}, stream{});
  CHECK(out[0] != out[0]);
  CHECK(kv.keys.bytes() == keys);
  CHECK(kv.length[0] == 9);
}

}  // namespace
}  // namespace kvfold::cuda
