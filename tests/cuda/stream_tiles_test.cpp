// SPDX-License-Identifier: MIT
// The walk over tiles of columns that `column_scores` takes.
#include "kvmeld/cuda/score/stream_tiles.cuh"

#include <catch2/catch.hpp>
#include <vector>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace stream_tiles_test {

/// Tiles of 64 columns, each from a position of its own on, some of them wanted.
struct walk_all {
  using walk = detail::tile_walk<2, 64>;
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    walk::shared_memory tiles;
  };
  index_t tiles;
  const index_t* position;  // [tiles]
  index_t* out;             // [1 + tiles] count, then tiles and what the second warp marked

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    walk all{tiles};
    index_t count = 0;
    for (;;) {
      const auto tile = all.next(
          shared.tiles,
          [&](index_t u, index_t x) {
            return walk::bounds{position[u] + x, position[u] + x};
          },
          [&](walk::bounds x) { return x.low % 5 == 0 && x.high == x.low + 63; },
          [&](walk::bounds x) { return x.low % 2 + warp() * 2; });
      if (tile.none()) {
        break;
      }
      if (thread_index() == 32) {
        out[1 + count] = tile.number() * 4 + (tile.whole() ? 2 : 0) + (tile.seen() ? 1 : 0);
      }
      ++count;
    }
    if (thread_index() == 32) {
      out[0] = count;
    }
  }
};

TEST_CASE("a walk over many tiles comes to every one that is wanted") {
  for (const index_t tiles : {0, 1, 31, 32, 33, 255, 256, 257, 700}) {
    emulator::chance random{static_cast<std::uint64_t>(tiles)};
    device_buffer<index_t> position(static_cast<std::size_t>(tiles)),
        out(static_cast<std::size_t>(tiles + 1));
    std::vector<index_t> wanted{0};
    for (index_t u = 0; u < tiles; ++u) {
      position[u] = static_cast<index_t>(random.below(u < 300 ? 40 : 3000));
      if (position[u] % 5 == 0) {
        wanted.push_back(4 * u + 2 + position[u] % 2);
      }
    }
    wanted[0] = static_cast<index_t>(wanted.size()) - 1;
    launch(walk_all{tiles, position.data(), out.data()}, {}, order(3));
    bool same = true;
    for (std::size_t k = 0; k < wanted.size(); ++k) {
      same = same && out[static_cast<std::ptrdiff_t>(k)] == wanted[k];
    }
    CHECK(same);
    CHECK((position.intact() && out.intact()));
  }
}

}  // namespace stream_tiles_test
}  // namespace kvmeld::cuda
