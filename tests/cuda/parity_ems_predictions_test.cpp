// SPDX-License-Identifier: MIT
// EMS in a step: a prediction decides when the removed entry's centre is found, and changes
// nothing.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>

#include "cuda/policy_calls.hpp"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/state.cuh"
#ifndef __CUDACC__  // a card does not say what it reads
#include "cuda/row_traffic.hpp"
#endif

namespace kvmeld::cuda {
namespace parity_ems_predictions_test {

/// Heads that decode tokens by a seed, each at its target.
template <class Scalar>
struct entry_stream {
  ems policy;
  cache_case shape;
  device_cache<Scalar> kv;
  device_buffer<unsigned char> memory, work;
  state_view state;
  device_buffer<index_t> guesses;
  device_buffer<Scalar> q, k, v, out;

  entry_stream(const ems& p, const cache_case& c)
      : policy(p),
        shape(c),
        kv(c, std::vector(static_cast<std::size_t>(c.heads), c.capacity - 1), 3),
        memory(state_bytes(p, kv.view())),
        work(workspace_bytes(p, kv.view())),
        state(make_state_view(p, kv.view(), {memory.data(), memory.size()}, order())),
        guesses(static_cast<std::size_t>(c.heads * compared_rows), -1),
        q(size(c.group)),
        k(size(1)),
        v(size(1)),
        out(size(c.group)) {
    CHECK(state.predicted != nullptr);
    state.predicted = guesses.data();
  }

  std::size_t size(index_t rows) const {
    return static_cast<std::size_t>(shape.heads * rows * shape.dim);
  }
  void step(std::uint64_t seed) {
    emulator::chance random{seed};
    for (auto* rows : {&q, &k, &v}) {
      for (std::size_t i = 0; i < rows->size(); ++i) {
        rows->host()[i] = from_float<Scalar>(0.5F * whole(random, 2));
      }
    }
    work.fill(0xff);
    policy_calls<ems, Scalar>::step(policy, kv.view(), state, q.data(), {k.data(), v.data()},
                                    budget{shape.capacity - 1}, out.data(),
                                    {work.data(), work.size()}, order(seed));
    kv.check_guards();
    CHECK((work.intact() && memory.intact() && guesses.intact() && out.intact()));
  }
  std::vector<index_t> predicted(index_t h) const {
    const index_t* const first = guesses.host() + std::ptrdiff_t{h} * compared_rows;
    return {first, first + compared_rows};
  }
  std::vector<index_t> positions(index_t h) const {
    const index_t* const first = kv.position.host() + kv.at(h, 0);
    return {first, first + shape.capacity - 1};
  }
  /// All that a step leaves but what it predicts.
  bool operator==(const entry_stream& other) const {
    bool same = kv.keys.bytes() == other.kv.keys.bytes() &&
                kv.values.bytes() == other.kv.values.bytes() &&
                kv.log_mass.bytes() == other.kv.log_mass.bytes() &&
                kv.position.bytes() == other.kv.position.bytes() &&
                kv.length.bytes() == other.kv.length.bytes() && out.bytes() == other.out.bytes();
    const auto equal = [&](const float* a, const float* b, index_t n) {
      same = same &&
             std::memcmp(on_host(a), on_host(b), static_cast<std::size_t>(n) * sizeof(float)) == 0;
    };
    for (index_t h = 0; h < shape.heads; ++h) {
      for (index_t c = 0; c < state.count; ++c) {
        equal(state.column(c, h), other.state.column(c, h), kv.length[h]);
      }
      equal(state.memory_of(h), other.state.memory_of(h), state.floats);
    }
    return same;
  }
};

/// LAW: right, wrong or none: a prediction changes no byte. How many of 100 held.
template <class Scalar>
double predictions_that_hold(const ems& p, const cache_case& c, std::uint64_t steps) {
  INFO("dim " << c.dim << ", group " << c.group << ", capacity " << c.capacity << ", window "
              << p.window);
  entry_stream<Scalar> own(p, c), none(p, c), wild(p, c);
  none.state.predicted = nullptr;
  emulator::chance random{17};
  double held = 0;
  for (std::uint64_t t = 0; t < steps; ++t) {
    for (std::size_t i = 0; i < wild.guesses.size(); ++i) {
      const auto any = random.below(static_cast<unsigned>(c.capacity) + 5U);
      wild.guesses.host()[i] = static_cast<index_t>(any) - 3;
    }
    std::vector<std::vector<index_t>> predicted, before;
    for (index_t h = 0; h < c.heads; ++h) {
      predicted.push_back(own.predicted(h)), before.push_back(own.positions(h));
    }
    own.step(t), none.step(t), wild.step(t);
    CHECK((own == none && wild == none));
    for (index_t h = 0; h < c.heads; ++h) {
      const auto after = own.positions(h);
      const auto& was = before[static_cast<std::size_t>(h)];
      const auto& guess = predicted[static_cast<std::size_t>(h)];
      held += std::any_of(guess.begin(), guess.end(), [&](index_t s) {
        return s >= 0 &&
               std::count(after.begin(), after.end(), was[static_cast<std::size_t>(s)]) == 0;
      });
    }
  }
  return 100 * held / static_cast<double>(steps) / c.heads;
}

TEST_CASE("ems: a prediction changes no byte, and most hold") {
  const ems p{.window = 6, .sinks = 2, .gamma = 2, .threshold = 0};
  CHECK(predictions_that_hold<half>(p, {.heads = 2, .capacity = 41, .dim = 16, .group = 2}, 60) >
        90);
  CHECK(predictions_that_hold<bfloat16>(p, {.heads = 1, .capacity = 90, .dim = 72, .group = 9},
                                        20) > 80);
  CHECK(predictions_that_hold<half>(p, {.heads = 1, .capacity = 60, .dim = 160, .group = 1}, 20) >
        80);
  CHECK(predictions_that_hold<half>(p, {.heads = 1, .capacity = 700, .dim = 8, .group = 1}, 8) >
        50);
}

/// Where tensor cores cannot compare.
TEST_CASE("ems: what is not predicted is searched") {
  CHECK(predictions_that_hold<float>({.window = 6, .sinks = 2, .threshold = 0},
                                     {.heads = 1, .capacity = 41, .dim = 16, .group = 2}, 20) >= 0);
  CHECK(predictions_that_hold<half>({.window = 6, .sinks = 2, .threshold = 0},
                                    {.heads = 1, .capacity = 41, .dim = 12, .group = 2}, 20) >= 0);
}

#ifndef __CUDACC__
/// What a step reads of rows, as the emulator counts it; `right`: is the prediction?
void check_rows(const cache_case& c, bool right) {
  INFO("dim " << c.dim << ", capacity " << c.capacity << ", right " << right);
  const ems p{.window = 6, .sinks = 2, .gamma = 2, .threshold = 0};
  entry_stream<half> x(p, c);
  for (std::uint64_t t = 0; t < 3; ++t) {
    x.step(t);
  }
  if (!right) {
    std::fill_n(x.guesses.host(), x.guesses.size(), -1);
  }
  const row_traffic counted(x.kv, &x.q);
  x.step(3);
  const double slots = c.heads * (c.capacity - 1);
  const double blocks = c.heads * detail::splits_of(c.heads, c.capacity);
  const index_t searches = right ? 0 : c.heads * ceiling(c.capacity, detail::slots_a_fast_tile);
  // Predicted rows once a block, or in a search the removed one; then two are merged by as many
  // threads as there are, and the step's own moves. The new key is measured.
  const double compared = blocks * (right ? compared_rows : 0) + searches;
  const double rows = slots * (right ? 1 : 2) + compared;
  const double merged = c.heads * 30;
  for (const auto plane : {row_traffic::keys, row_traffic::values}) {
    CHECK(counted.loaded(plane) <= rows + merged);
    CHECK(counted.sectors(plane) <= 1.1);
  }
  CHECK(counted.bank_conflicts == 0);
  CHECK(counted.launches == (in_one_launch(c) ? 2 : 3));
  // 16 slots: K once and V twice for 8 query heads, and three for each of them that is compared.
  const double tiles = c.heads * ceiling(c.capacity - 1, 16);
  const double again = right ? 0 : c.heads * ceiling(c.capacity, 16);
  const double mmas = (3 + 6) * tiles + 6 * again + 2 * (blocks + searches) * 4;
  CHECK(static_cast<double>(counted.mmas) / (mmas * (c.dim / 16)) <= 1);
}

TEST_CASE("ems reads keys and values once where its prediction holds, and twice where it fails") {
  for (const bool right : {true, false}) {
    check_rows({.heads = 2, .capacity = 513, .dim = 128, .group = 4}, right);
    check_rows({.heads = 1, .capacity = 200, .dim = 64, .group = 8}, right);
  }
}

#endif

}  // namespace parity_ems_predictions_test
}  // namespace kvmeld::cuda
