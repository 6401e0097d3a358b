// SPDX-License-Identifier: MIT
// What the emulator counts, of kernels whose traffic is known by hand.
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {
namespace traffic_emulator_test {

using emulator::traffic;

/// A warp loads 16 bytes a lane, `apart` elements from lane to lane, and stores them side by side.
struct move_apart {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  const float* from;
  float* to;
  index_t apart;

  void operator()(shared_memory&) const {
    if (warp() == 1 && lane() >= 8) {
      return;  // the second warp loads 8 lanes' worth
    }
    store_16(to + 4 * thread_index(), load_16(from + apart * thread_index()));
  }
};

TEST_CASE("bytes and sectors are counted by warps and arrays") {
  alignas(32) float x[64 * 8] = {}, y[64 * 4] = {};
  for (const index_t apart : {4, 8}) {  // side by side; the half of every sector
    traffic counted;
    counted.watch(x, sizeof x);
    launch(move_apart{x, y, apart}, {}, {});
    CHECK(counted.of(0).loaded.bytes == 40 * 16);
    CHECK(counted.of(0).loaded.sectors == (apart == 4 ? 20 : 40));
    CHECK(counted.of(0).stored.bytes == 0);
    CHECK(counted.others().stored.bytes == 40 * 16);
    CHECK(counted.others().stored.sectors == 20);
    CHECK((counted.barriers == 0 && counted.mmas == 0 && counted.shared_loads == 0));
  }
  traffic counted;
  launch(move_apart{x, y, 0}, {}, {});
  CHECK(counted.others().loaded.sectors == 2);  // a warp's lanes share it, warps do not
}

/// Lanes load elements `stride` apart, then 16 bytes `stride` vectors apart; twice, by blocks.
struct read_shared {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<float, 2048> x;
  };
  index_t stride;

  void operator()(shared_memory& shared) const {
    for (index_t i = lane(); i < 2048; i += 32) {
      shared.x[i] = 0;
    }
    sync_block();
    float sum = shared.x[lane() * stride % 2048];
    sync_warp();
    sum += shared.x.vector(lane() * stride % 512 * 4)[0];
    if (sum == 1) {
      sync_warp();
    }
  }
};

TEST_CASE("bank conflicts are what loads of shared memory take beyond their bytes") {
  struct expected {
    index_t stride;
    std::int64_t words, vectors;  // conflicts
  };
  // A load of 32 words is one, of 32 vectors four, each of 8 lanes.
  for (const expected& x : {expected{0, 0, 0}, expected{1, 0, 0}, expected{2, 1, 4},
                            expected{3, 0, 0}, expected{8, 7, 28}, expected{32, 31, 28}}) {
    INFO("stride " << x.stride);
    traffic counted;
    launch(read_shared{x.stride}, {.x = 3}, {});
    CHECK(counted.shared_loads == 3 * (1 + 4));
    CHECK(counted.bank_conflicts == 3 * (x.words + x.vectors));
    CHECK(counted.barriers == 3);
  }
}

/// Matrices from rows `pitch` elements apart, multiplied once.
struct multiply_rows {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<half, 32 * 64> x;
  };
  index_t pitch;

  void operator()(shared_memory& shared) const {
    for (index_t i = thread_index(); i < 32 * 64; i += threads) {
      shared.x[i] = from_float<half>(0.0F);
    }
    sync_block();
    const auto a = load_matrices(shared.x, lane() * pitch);
    const auto b = load_matrices_transposed(shared.x, lane() * pitch);
    float c[4] = {};
    mma_16x8x16<half>(c, a.of, {b.of[0], b.of[1]});
    sync_block();
  }
};

TEST_CASE("matrices are loads of eight rows, and products are counted by warps") {
  for (const index_t pitch : {8, 64, 40}) {
    traffic counted;
    launch(multiply_rows{pitch}, {.x = 2}, {});
    CHECK(counted.shared_loads == 2 * 2 * 8);
    CHECK(counted.bank_conflicts == (pitch == 64 ? 2 * 2 * 8 * 7 : 0));
    CHECK(counted.mmas == 2 * 2);
    CHECK(counted.barriers == 2 * 2);
  }
}

TEST_CASE("only what runs while it counts is counted, by the innermost") {
  alignas(32) float x[256] = {};
  launch(move_apart{x, x, 0}, {}, {});
  traffic outer;
  {
    traffic inner;
    launch(move_apart{x, x, 0}, {}, {});
    CHECK(inner.others().loaded.bytes == 640);
  }
  CHECK(outer.others().loaded.bytes == 0);
  launch(move_apart{x, x, 0}, {}, {});
  CHECK(outer.others().loaded.bytes == 640);
}

}  // namespace traffic_emulator_test
}  // namespace kvmeld::cuda
