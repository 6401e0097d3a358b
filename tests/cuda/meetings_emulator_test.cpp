// SPDX-License-Identifier: MIT
// Where the lanes of a warp meet on the emulator: what each gets does not hang on who runs first,
// and a lane that will not come is named.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {
namespace meetings_emulator_test {

using Catch::Matchers::Contains;

/// Lower lanes go on to exchange among themselves, far ahead of an upper lane that has not yet read
/// what all of them exchanged.
struct run_ahead {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  index_t* out;  // [32]

  void operator()(shared_memory&) const {
    const index_t of_all = shuffle(lane() + 1, 0);
    index_t of_some = 0;
    for (index_t i = 0; lane() < 16 && i < 20; ++i) {
      of_some += shuffle(100 + lane(), i % 16, 0x0000ffffU);
    }
    out[lane()] = of_all + of_some;
  }
};

/// What every lane sees of a warp's values.
struct warp_values {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  index_t* out;  // [7, 32]

  void operator()(shared_memory&) const {
    const index_t l = lane();
    out[l] = shuffle(l * l, (l + 5) % 32);
    out[32 + l] = static_cast<index_t>(ballot(l % 3 == 0));
    out[160 + l] = static_cast<index_t>(equal_lanes(l % 4));
    out[64 + l] = reduce_sum(l, 8);
    out[96 + l] = reduce_max(l % 5, 16);
    out[192 + l] = reduce_min((l + 3) % 32 - 5);
    out[128 + l] = l < 16 ? shuffle_xor(l, 15, 0x0000ffffU) : 0;
  }
};

/// One lane is in a barrier of the block when all others want it.
struct lane_in_barrier {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {};

  void operator()(shared_memory&) const {
    if (thread_index() == 37) {
      sync_block();
    } else {
      shuffle(lane(), 0);
    }
  }
};

/// One lane makes another call than the others: elsewhere, or in the same line.
struct other_call {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  bool elsewhere;

  void operator()(shared_memory&) const {
    if (lane() != 3) {
      shuffle(lane(), 0, all_lanes, "kernel.cuh", 7);
    } else if (elsewhere) {
      shuffle(lane(), 0, all_lanes, "kernel.cuh", 8);
    } else {
      ballot(true, all_lanes, "kernel.cuh", 7);
    }
  }
};

TEST_CASE("lanes exchange values, among all or some") {
  std::vector<index_t> out(224);
  launch(warp_values{out.data()}, {}, stream{});
  for (index_t l = 0; l < 32; ++l) {
    const auto at = [&](index_t row) { return out[static_cast<std::size_t>(32 * row + l)]; };
    const index_t from = (l + 5) % 32;
    CHECK(at(0) == from * from);
    CHECK(static_cast<unsigned>(at(1)) == 0x49249249U);
    CHECK(at(2) == 8 * (l / 8 * 8) + 28);
    CHECK(at(3) == 4);
    CHECK(at(6) == -5);
    CHECK(at(4) == (l < 16 ? 15 - l : 0));
    CHECK(static_cast<unsigned>(at(5)) == 0x11111111U << (l % 4));
  }
}

TEST_CASE("lanes that go on overwrite nothing that others have still to read") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<index_t> out(32);
    launch(run_ahead{out.data()}, {}, stream{seed});
    CHECK(std::ranges::count(out, 1 + 20 * 100 + 120 + 6) == 16);
    CHECK(std::ranges::count(out, 1) == 16);
  }
}

TEST_CASE("a lane that waits in a barrier of the block is named to those who want it") {
  int named = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    try {
      launch(lane_in_barrier{}, {}, stream{seed});
    } catch (const emulator::error& e) {
      const std::string what = e.what();
      named += what.find("lane 5 of the mask waits in sync_block at meetings_") != what.npos;
      continue;
    }
    FAIL("expected an error with seed " << seed);
  }
  CHECK(named >= 10);  // of 20: the last of a warp to come sees it, lane 5 itself seldom
}

TEST_CASE("lanes that come from another line, or to another call, are reported with both") {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CHECK_THROWS_WITH(launch(other_call{true}, {}, stream{seed}),
                      Contains("at kernel.cuh:7") && Contains("at kernel.cuh:8"));
    CHECK_THROWS_WITH(launch(other_call{false}, {}, stream{seed}),
                      Contains("calls ballot(0") && Contains("calls shuffle(0"));
  }
}

}  // namespace meetings_emulator_test
}  // namespace kvmeld::cuda
