// SPDX-License-Identifier: MIT
// What the emulator says of matrices over the lanes, of memory used twice and of early launches,
// and that it notices their misuse. Each fault is a correct kernel with one thing wrong.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {
namespace matrices_emulator_test {

using Catch::Matchers::Contains;

enum class fault { none, misaligned, outside, unset, some_lanes, no_barrier, no_wait };

constexpr index_t pitch = 24;  // elements of a row

/// Four matrices of 8 rows, pairs of elements `[4, 32]` as the lanes get them: as they lie,
/// transposed, and transposed twice.
struct deal_matrices {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_array<half, 32 * pitch> rows;
  };
  unsigned* out;  // [3, 4, 32]
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    for (index_t e = 0; e < 8; ++e) {
      if (!(wrong == fault::unset && lane() == 9 && e == 3)) {
        shared.rows[lane() * pitch + e] = from_float<half>(static_cast<float>(lane() * 8 + e));
      }
    }
    if (wrong != fault::no_barrier) {
      sync_warp();
    }
    index_t at = lane() * pitch;
    at += wrong == fault::misaligned && lane() == 5 ? 4 : 0;
    at += wrong == fault::outside && lane() == 31 ? pitch : 0;
    if (wrong == fault::some_lanes && lane() == 7) {
      return;
    }
    const auto rows = load_matrices(shared.rows, at);
    const auto columns = load_matrices_transposed(shared.rows, at);
    for (index_t m = 0; m < 4; ++m) {
      out[m * 32 + lane()] = rows.of[m];
      out[128 + m * 32 + lane()] = columns.of[m];
      out[256 + m * 32 + lane()] = transposed(columns.of[m]);
    }
  }
};

std::vector<unsigned> dealt(fault wrong, std::uint64_t seed = 1) {
  std::vector<unsigned> out(384);
  launch(deal_matrices{out.data(), wrong}, {}, stream{seed});
  return out;
}

TEST_CASE("matrices are dealt to the lanes, and transposed") {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const auto out = dealt(fault::none, seed);
    const auto pair = [](index_t m, index_t row, index_t column, index_t next) {
      const auto element = [](index_t i) { return from_float<half>(static_cast<float>(i)); };
      return pair_of(element((m * 8 + row) * 8 + column),
                     element((m * 8 + row) * 8 + column + next));
    };
    for (index_t m = 0; m < 4; ++m) {
      for (index_t l = 0; l < 32; ++l) {
        const auto at = static_cast<std::size_t>(m * 32 + l);
        CHECK(out[at] == pair(m, l / 4, l % 4 * 2, 1));
        CHECK(out[128 + at] == pair(m, l % 4 * 2, l / 4, 8));  // the next row's element
        CHECK(out[256 + at] == out[at]);
      }
    }
  }
}

TEST_CASE("a matrix row that is misaligned, outside, unwritten or not waited for is noticed") {
  CHECK_THROWS_WITH(dealt(fault::misaligned),
                    Contains("expected an index that is a multiple of 8 for a vector, got 124"));
  CHECK_THROWS_WITH(dealt(fault::outside), Contains("expected an index of 0 to 767, got 768"));
  CHECK_THROWS_WITH(dealt(fault::no_barrier), Contains("race"));
  CHECK_THROWS_WITH(dealt(fault::some_lanes), Contains("lane 7 of the mask has left the kernel"));
  const auto out = dealt(fault::unset);  // NaN: all bits
  CHECK(out[32 + 1 * 4 + 1] >> 16 == 0xffffU);
  CHECK((out[128 + 32 + 3 * 4] >> 16) == 0xffffU);
}

/// `y` = `x` reversed, then once more as floats in the same memory.
struct use_twice {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {
    shared_union<shared_array<half, 64>, shared_array<float, 64>> memory;
  };
  const half* x;
  float* y;
  fault wrong = fault::none;

  void operator()(shared_memory& shared) const {
    const index_t t = thread_index();
    shared.memory.first[t] = x[t];
    sync_block();
    const float mine = to_float(shared.memory.first[63 - t]);
    if (wrong != fault::no_barrier) {
      sync_block();
    }
    shared.memory.then[t] = mine;
    sync_block();
    y[t] = shared.memory.then[63 - t];
  }
};

TEST_CASE("shared memory is used twice, with a barrier between") {
  std::vector<half> x(64);
  std::vector<float> y(64);
  for (index_t i = 0; i < 64; ++i) {
    x[static_cast<std::size_t>(i)] = from_float<half>(static_cast<float>(i));
  }
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    launch(use_twice{x.data(), y.data()}, {}, stream{seed});
    CHECK(y[5] == 5.0F);
    CHECK_THROWS_WITH(launch(use_twice{x.data(), y.data(), fault::no_barrier}, {}, stream{seed}),
                      Contains("race"));
  }
}

/// Copies pairs, of numbers and of 16-bit elements.
struct copy_pairs {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  const half* from;
  unsigned* bits;  // [3]: the pair, each of it
  float* floats;

  void operator()(shared_memory&) const {
    if (lane() == 0) {
      bits[0] = load_pair(from);
      bits[1] = low_of<half>(bits[0]).bits, bits[2] = high_of<half>(bits[0]).bits;
      store_pair(floats, 1, 2);
    }
  }
};

struct copy_words {
  static constexpr index_t threads = 32;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  const half* from;
  unsigned* to;

  void operator()(shared_memory&) const {
    const auto x = load_words(from);
    to[lane()] = x[lane() % 4];
  }
};

TEST_CASE("pairs of global memory are aligned") {
  alignas(8) const half x[3] = {{1}, {2}, {3}};
  alignas(8) float y[3] = {};
  unsigned bits[3] = {};
  launch(copy_pairs{x, bits, y}, {}, stream{});
  CHECK((bits[0] == 0x00020001U && bits[1] == 1 && bits[2] == 2));
  CHECK(y[1] == 2.0F);
  CHECK_THROWS_WITH(launch(copy_pairs{x + 1, bits, y}, {}, stream{}),
                    Contains("expected an address that is a multiple of 4 bytes"));
  CHECK_THROWS_WITH(launch(copy_pairs{x, bits, y + 1}, {}, stream{}),
                    Contains("expected an address that is a multiple of 8 bytes"));
}

TEST_CASE("sixteen bytes of global memory are aligned") {
  alignas(16) half x[16] = {};
  x[6].bits = 3, x[7].bits = 4;
  std::vector<unsigned> words(32);
  launch(copy_words{x, words.data()}, {}, stream{});
  CHECK((words[3] == 0x00040003U && words[2] == 0));
  CHECK_THROWS_WITH(launch(copy_words{x + 4, words.data()}, {}, stream{}),
                    Contains("expected an address that is a multiple of 16 bytes"));
}

TEST_CASE("2 to a power is as coarse as the hardware's") {
  CHECK(exp2_approx(3.0F) == 8.0F);
  CHECK(exp2_approx(-127.0F) == 0.0F);
  CHECK(exp2_approx(-200.0F) == 0.0F);
  CHECK(std::abs(exp2_approx(0.5F) - std::sqrt(2.0F)) < 1e-6F);
  CHECK(exp2_approx(0.5F) != std::exp2(0.5F));
}

struct wait_then_end {
  static constexpr index_t threads = 64;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  fault wrong = fault::none;

  void operator()(shared_memory&) const {
    let_next_start();
    if (wrong != fault::no_wait || lane() != 3) {
      wait_for_previous();
    }
  }
};

TEST_CASE("every thread of an early launch waits for the one before") {
  CHECK_NOTHROW(launch_early(wait_then_end{}, {.x = 3}, stream{}));
  CHECK_NOTHROW(launch(wait_then_end{fault::no_wait}, {}, stream{}));
  CHECK_THROWS_WITH(launch_early(wait_then_end{fault::no_wait}, {.x = 3}, stream{}),
                    Contains("62 of 64 threads waited"));
}

}  // namespace matrices_emulator_test
}  // namespace kvmeld::cuda
