// SPDX-License-Identifier: MIT
// The emulator's registers of sixteen bytes, and its powers of 2.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {
namespace words_emulator_test {

using Catch::Matchers::Contains;

enum class fault {
  none,
  no_barrier,   // between writing and reading a tile
  half_vector,  // eight bytes into a vector
  odd_address,  // four bytes after a multiple of sixteen
};

/// Sixteen bytes of halves at a time as registers, through shared memory; and numbers' powers.
struct words_and_powers {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<half, 256> tile;
  };
  const half* x;    // [256]
  unsigned* words;  // [256], of global and of shared memory
  float* powers;    // [3]
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    const auto global = load_words(x + 8 * t + (wrong == fault::odd_address && t == 9 ? 2 : 0));
    shared.tile.set_vector(8 * t, load_16(x + 8 * t));
    if (wrong != fault::no_barrier) {
      sync_warp();
    }
    const auto own = shared.tile.words(8 * (31 - t) + (wrong == fault::half_vector ? 4 : 0));
    for (index_t i = 0; i < 4; ++i) {
      words[4 * t + i] = global[i], words[128 + 4 * t + i] = own[i];
    }
    powers[0] = exp2_approx(-3.5F), powers[1] = log2_approx(10.0F);
    powers[2] = exp2_approx(-127.0F);
  }
};

TEST_CASE("sixteen bytes come as four registers, and powers of 2 as coarse as the hardware's") {
  std::vector<half> x(256);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = half{static_cast<std::uint16_t>(i * 77)};
  }
  std::vector<unsigned> words(256);
  std::vector<float> powers(3);
  words_and_powers kernel{x.data(), words.data(), powers.data()};
  launch(kernel, {}, stream{});
  for (std::size_t t = 0; t < 32; ++t) {
    for (std::size_t i = 0; i < 4; ++i) {
      const auto pair = [&](std::size_t e) { return x[e].bits | unsigned{x[e + 1].bits} << 16; };
      CHECK(words[4 * t + i] == pair(8 * t + 2 * i));
      CHECK(words[128 + 4 * t + i] == pair(8 * (31 - t) + 2 * i));
    }
  }
  CHECK(powers[0] == Approx(0.0883883476).epsilon(1e-6));
  CHECK(powers[1] == Approx(3.3219280949).epsilon(1e-6));
  CHECK(powers[2] == 0);  // too small a number is none
  const auto broken = [&](fault wrong) {
    kernel.wrong = wrong;
    launch(kernel, {}, stream{});
  };
  CHECK_THROWS_WITH(broken(fault::odd_address),
                    Contains("expected an address that is a multiple of 16 bytes"));
  CHECK_THROWS_WITH(broken(fault::half_vector),
                    Contains("expected an index that is a multiple of 8 for a vector"));
  CHECK_THROWS_WITH(broken(fault::no_barrier), Contains("race"));
}

TEST_CASE("the lesser of each of two pairs, zeros and negative numbers among them") {
  for (const float a : {-1.0F, 0.0F, 0.5F, 60000.0F}) {
    for (const float b : {-1.0F, 0.0F, 0.25F, 60000.0F}) {
      const auto of = [](float x) { return from_float<half>(x); };
      const unsigned least = min_pairs<half>(pair_of(of(a), of(b)), pair_of(of(b), of(a)));
      CHECK(to_float(low_of<half>(least)) == std::min(a, b));
      CHECK(to_float(high_of<half>(least)) == std::min(a, b));
    }
  }
}

}  // namespace words_emulator_test
}  // namespace kvmeld::cuda
