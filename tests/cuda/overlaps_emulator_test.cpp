// SPDX-License-Identifier: MIT
// What the emulator knows of launches, and of launches, copies and blocks that a GPU overlaps:
// kernels that are right, each with one thing wrong.
#include <catch2/catch.hpp>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace overlaps_emulator_test {

using Catch::Matchers::Contains;
using emulator::simultaneous_blocks;

/// `x = i + 1`.
struct fill_numbers {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  float* x;  // [32 · blocks]

  void operator()(shared_memory&) const {
    let_next_start();
    const index_t i = static_cast<index_t>(block_index().x) * threads + thread_index();
    x[i] = static_cast<float>(i + 1);
  }
};

TEST_CASE("a grid that the hardware refuses is refused") {
  for (const extent blocks : {extent{.y = 65536}, extent{.z = 65536}, extent{.x = 0x80000000U}}) {
    CHECK_THROWS_WITH(launch(fill_numbers{nullptr}, blocks, order()),
                      Contains("expected a grid of at most 2147483647, 65535 and 65535 blocks"));
  }
}

enum class fault { none, reads_early, writes_early, waits_for_some };

/// `y = 2 x` in a launch that may overlap the one that writes `x`, through shared memory.
struct double_numbers {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 32> own;
  };
  float *x, *y;
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    let_next_start();
    const index_t t = thread_index(), i = static_cast<index_t>(block_index().x) * threads + t;
    y[i] = 7;  // no other thread's
    if (wrong == fault::writes_early && t == 3) {
      x[i] = -1;
    }
    float number = wrong == fault::reads_early && t == 5 ? x[i] : 0.0F;
    shared.own[t] = 2;
    if (wrong != fault::waits_for_some || t != 9) {
      wait_for_previous();
    }
    sync_block();
    number = number == 0 ? x[i] : number;
    y[i] = number * shared.own[31 - t];
  }
};

/// The launches of a step: the last may overlap both others.
std::vector<float> doubled(fault second, fault third = fault::none) {
  device_buffer<float> x(64), y(64), z(64);
  for (std::ptrdiff_t i = 0; i < 64; ++i) {
    x[i] = 100, y[i] = 100;
  }
  const stream on = order(7);
  launch(fill_numbers{x.data()}, {.x = 2}, on);
  launch_early(double_numbers{x.data(), y.data(), second}, {.x = 2}, on);
  launch_early(double_numbers{y.data(), z.data(), third}, {.x = 2}, on);
  return {std::as_const(z).host(), std::as_const(z).host() + 64};
}

TEST_CASE("a launch that waits finds what the launches before wrote") {
  const auto z = doubled(fault::none);
  for (std::size_t i = 0; i < z.size(); ++i) {
    CHECK(z[i] == 4.0F * static_cast<float>(i + 1));
  }
}

TEST_CASE("what a launch reads before it waits is what there was") {
  CHECK(doubled(fault::reads_early)[5] == 400);
  CHECK(doubled(fault::none, fault::reads_early)[32 + 5] == 200);
  CHECK(doubled(fault::reads_early)[6] == 28);
}

TEST_CASE("what a launch writes before it waits is reported, and a thread that does not wait") {
  CHECK_THROWS_WITH(doubled(fault::writes_early),
                    Contains("written before the launch before, which writes it, was waited for"));
  CHECK_THROWS_WITH(doubled(fault::none, fault::writes_early), Contains("was waited for"));
  CHECK_THROWS_WITH(doubled(fault::waits_for_some),
                    Contains("31 of 32 threads waited for the previous launch"));
}

/// `y = x`, copied asynchronously; `x` becomes 0.
struct take_numbers {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 128> own;
  };
  float *x, *y;  // [128]
  bool too_soon;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    copy_async(shared.own, 4 * t, x + 4 * t);
    commit_async();
    if (too_soon && t == 11) {
      x[4 * t + 2] = 0;
    }
    wait_async<0>();
    sync_block();
    for (index_t i = 4 * t; i < 4 * t + 4; ++i) {
      x[i] = 0, y[i] = shared.own[i];
    }
  }
};

TEST_CASE("a copy's source that is written before it was waited for is reported") {
  device_buffer<float> x(128), y(128);
  for (const bool too_soon : {false, true}) {
    for (std::ptrdiff_t i = 0; i < 128; ++i) {
      x[i] = static_cast<float>(i);
    }
    const auto run = [&] { launch(take_numbers{x.data(), y.data(), too_soon}, {}, order()); };
    if (too_soon) {
      CHECK_THROWS_WITH(run(), Contains("source was written before the copy was waited for"));
    } else {
      run();
      CHECK(y[127] == 127);
    }
  }
}

/// Every block writes the sum of `x [4, 32]` up to its own row into its element of `to`.
struct add_up {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  const float* x;
  float* to;
  bool from_others = false;  // from what the block before wrote
  bool into_one = false;     // into one element

  void operator()(shared_memory&) const {
    const auto b = static_cast<index_t>(block_index().x);
    float sum = from_others && b > 0 ? to[b - 1] : 0.0F;
    for (index_t row = from_others ? b : 0; row <= b; ++row) {
      sum += reduce_sum(x[32 * row + lane()]);
    }
    if (lane() == 0) {
      to[into_one ? 0 : b] = sum;
    }
  }
};

TEST_CASE("blocks at once find nothing of one another, and do not write the same") {
  device_buffer<float> x(128), to(4, 0);
  for (std::ptrdiff_t i = 0; i < 128; ++i) {
    x[i] = 1;
  }
  const simultaneous_blocks all;
  launch(add_up{x.data(), to.data()}, {.x = 4}, order(3));
  CHECK(std::as_const(to)[3] == 128);
  launch(add_up{x.data(), to.data(), true}, {.x = 4}, order(3));
  CHECK(std::as_const(to)[3] == 32 + 96);  // what there was before the launch
  to[2] = 0;
  launch(add_up{x.data(), to.data(), true}, {.x = 4}, order(3));
  CHECK(std::as_const(to)[3] == 32);
  CHECK_THROWS_WITH(launch(add_up{x.data(), to.data(), false, true}, {.x = 4}, order(3)),
                    Contains("race: two blocks of a launch write the same global memory"));
}

}  // namespace overlaps_emulator_test
}  // namespace kvmeld::cuda
