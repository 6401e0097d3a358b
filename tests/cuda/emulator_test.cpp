// SPDX-License-Identifier: MIT
// The emulator itself: that kernels compute what they say in every order of threads, and that what
// a GPU would leave undefined is noticed. Each fault is a correct kernel with one thing wrong.
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {
namespace emulator_test {

using Catch::Matchers::Contains;

enum class fault {
  none,
  no_barrier,       // between writing and reading a tile
  no_warp_barrier,  // the same within a warp
  some_at_barrier,  // half the block only
  early_exit,       // a thread is gone when the others meet
  wide_index,       // one element after the tile
  unset,            // an element that was not written
  other_mask,       // one lane names other lanes
  left_out,         // a lane names all but itself
  other_distance,   // one lane exchanges with another partner
  no_wait,          // for a copy in flight
};

/// `sum[block] = Σ x` over blocks of 64, through shared memory and a butterfly.
struct block_sum {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 64> tile;
    shared_array<float, 2> of_warp;
  };
  const float* x;
  float* sum;
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    const float* mine = x + 64 * static_cast<index_t>(block_index().x);
    if (wrong == fault::early_exit && t == 7) {
      return;
    }
    if (!(wrong == fault::unset && t == 5)) {
      shared.tile[t + (wrong == fault::wide_index && t == 63 ? 1 : 0)] = mine[t];
    }
    if (wrong == fault::some_at_barrier ? t < 32 : wrong != fault::no_barrier) {
      sync_block();
    }
    float y = shared.tile[63 - t];  // of the other warp
    for (index_t d = 16; d > 0; d /= 2) {
      const bool odd = t == 3 && d == 4;
      const unsigned mask = !odd                         ? all_lanes
                            : wrong == fault::other_mask ? 0x0000ffffU
                            : wrong == fault::left_out   ? ~8U
                                                         : all_lanes;
      y += shuffle_xor(y, odd && wrong == fault::other_distance ? 8 : d, mask);
    }
    if (lane() == 0) {
      shared.of_warp[warp()] = y;
    }
    sync_block();
    if (t == 0) {
      sum[block_index().x] = shared.of_warp[0] + shared.of_warp[1];
    }
  }
};

/// `y` = `x` reversed within each 32, through shared memory and a barrier of the warp.
struct warp_reverse {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 64> tile;
  };
  const float* x;
  float* y;
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    shared.tile[t] = x[t];
    if (wrong != fault::no_warp_barrier) {
      sync_warp();
    }
    y[t] = shared.tile[32 * warp() + 31 - lane()];
  }
};

/// Both warps read an element, the first one with all its lanes, and then writes it: a barrier of
/// its own does not keep it from what the other warp may still read.
struct read_by_both {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 1> one;
  };
  float* out;
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    if (t == 0) {
      shared.one[0] = 2;
    }
    sync_block();
    const float x = shared.one[0];
    if (wrong == fault::no_barrier) {
      sync_warp();
    } else {
      sync_block();
    }
    if (t == 0) {
      shared.one[0] = 3;
    }
    sync_block();
    out[t] = x * shared.one[0];
  }
};

/// `y` = `x`, through asynchronous copies.
struct async_double {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 256> tile;
  };
  const float* x;
  float* y;
  index_t bytes = 16;
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    copy_async(shared.tile, 4 * t, x + 4 * t, bytes);
    commit_async();
    copy_async(shared.tile, 128 + 4 * t, x + 4 * t, bytes);
    commit_async();
    if (wrong != fault::no_wait) {
      wait_async<1>();
    }
    sync_block();
    for (index_t i = 0; i < 4; ++i) {
      y[4 * t + i] = shared.tile[4 * (31 - t) + i];
    }
    if (wrong == fault::no_wait) {
      return;
    }
    wait_async<0>();
    sync_block();
    for (index_t i = 0; i < 4; ++i) {
      y[4 * t + i] += shared.tile[128 + 4 * (31 - t) + i];
    }
  }
};

struct count_all {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<index_t, 1> n;
  };
  index_t* total;

  void operator()(shared_memory& shared) const {
    if (thread_index() == 0) {
      shared.n[0] = 0;
    }
    sync_block();
    add_shared(shared.n, 0, thread_index());
    sync_block();
    if (thread_index() == 0) {
      add_global(total, shared.n[0]);
    }
  }
};

std::vector<float> counted(std::size_t n) {
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(i);
  }
  return x;
}

float sum_of_blocks(fault wrong, std::uint64_t seed) {
  const auto x = counted(192);
  std::vector<float> sum(3, -1.0F);
  launch(block_sum{x.data(), sum.data(), wrong}, {.x = 3}, stream{seed});
  return sum[0] + sum[1] + sum[2];
}

TEST_CASE("blocks of fibers compute the same in every order of threads") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CHECK(sum_of_blocks(fault::none, seed) == 191.0F * 192.0F / 2.0F);
    const auto x = counted(64);
    std::vector<float> y(64);
    launch(warp_reverse{x.data(), y.data()}, {}, stream{seed});
    CHECK(y[0] == 31.0F);
    CHECK(y[63] == 32.0F);
    index_t total = 0;
    launch(count_all{&total}, {.x = 2, .y = 3, .z = 2}, stream{seed});
    CHECK(total == 12 * 63 * 32);
  }
}

TEST_CASE("asynchronous copies arrive when they are waited for") {
  const auto x = counted(128);
  std::vector<float> y(128);
  launch(async_double{x.data(), y.data()}, {}, stream{});
  CHECK(y[0] == 2 * 124.0F);
  CHECK(y[127] == 2 * 3.0F);
  launch(async_double{x.data(), y.data(), 8}, {}, stream{});  // zeros after 8 bytes
  CHECK(y[1] == 2 * 125.0F);
  CHECK(y[2] == 0.0F);
  launch(async_double{x.data(), y.data(), 16, fault::no_wait}, {}, stream{});
  CHECK(y[0] != y[0]);
}

TEST_CASE("a missing barrier is a race in every order of threads") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CHECK_THROWS_WITH(sum_of_blocks(fault::no_barrier, seed),
                      Contains("race") && Contains("no barrier between"));
    const auto x = counted(64);
    std::vector<float> y(64);
    CHECK_THROWS_WITH(
        launch(warp_reverse{x.data(), y.data(), fault::no_warp_barrier}, {}, stream{seed}),
        Contains("race"));
    CHECK_THROWS_WITH(launch(read_by_both{y.data(), fault::no_barrier}, {}, stream{seed}),
                      Contains("race"));
    launch(read_by_both{y.data()}, {}, stream{seed});
    CHECK(std::ranges::count(y, 6.0F) == 64);
  }
}

TEST_CASE("a barrier that some threads miss is reported, not waited for") {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CHECK_THROWS_WITH(sum_of_blocks(fault::some_at_barrier, seed),
                      Contains("barrier") || Contains("race"));
    CHECK_THROWS_WITH(sum_of_blocks(fault::early_exit, seed),
                      Contains("divergent barrier") && Contains("thread 7 has left the kernel"));
  }
}

TEST_CASE("an index past the end of shared memory is reported") {
  CHECK_THROWS_WITH(sum_of_blocks(fault::wide_index, 1),
                    Contains("expected an index of 0 to 63, got 64"));
}

TEST_CASE("shared memory that was not written is not a number") {
  const float sum = sum_of_blocks(fault::unset, 1);
  CHECK(sum != sum);
}

TEST_CASE("lanes that disagree on a shuffle are reported with both their calls") {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CHECK_THROWS_WITH(sum_of_blocks(fault::other_mask, seed),
                      Contains("mask 0x0000ffff") && Contains("mask 0xffffffff"));
    CHECK_THROWS_WITH(sum_of_blocks(fault::left_out, seed),
                      Contains("the mask leaves out the lane that calls") && Contains("lane 3"));
    CHECK_THROWS_WITH(sum_of_blocks(fault::other_distance, seed),
                      Contains("shuffle_xor(8") && Contains("shuffle_xor(4"));
  }
}

}  // namespace emulator_test
}  // namespace kvmeld::cuda
