// SPDX-License-Identifier: MIT
// What leverage multiplies and moves, as the emulator counts it, beside the least that there is.
#include <catch2/catch.hpp>

#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/policies/fold/leverage.cuh"

namespace kvmeld::cuda {
namespace leverage_traffic_emulator_test {

using emulator::traffic;

void check_leverage(const cache_case& c) {
  const index_t n = c.capacity, dim = c.dim, depth = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
  INFO("dim " << dim << ", slots " << n);
  device_cache<half> kv(c, std::vector(static_cast<std::size_t>(c.heads), n), 3,
                        {slot_reduce::sum, slot_reduce::max});
  detail::leverage_scratch work{};
  workspace_allocator count;
  work.allocate(count, detail::shape_of(kv.view()));
  device_buffer<unsigned char> memory(count.used(), 0);
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, detail::shape_of(kv.view()));
  device_buffer<index_t> planned(static_cast<std::size_t>(c.heads));
  const detail::unrotated_keys<half> keys{kv.view(), {}, budget{.slots = 0}, nullptr};
  const index_t parts = ceiling(n, 512), cleared = dim < depth ? 1 : 0;
  const stream launches = order();
  {
    const traffic counted;
    detail::covariance_of<true>(kv.view(), keys, n, planned.data(), 1, 0, work.moments, launches);
    // 64, 32 or 16 rows at a time, by tiles of 16 × 16 of the lower triangle; a product is six of
    // 16 bits.
    const index_t some = 4096 / depth, tiles = ceiling(dim, 16);
    index_t turns = 0;
    for (index_t r = 0; r < n; r += 512) {
      turns += ceiling(std::min<index_t>(512, n - r), some);
    }
    CHECK(counted.mmas ==
          std::int64_t{c.heads} * turns * (some / 16) * (tiles * (tiles + 1) / 2) * 2 * 6);
    CHECK(counted.bank_conflicts == 0);
    // One for every turn, six a block for its two sums; one a block of covariances.
    CHECK(counted.barriers == c.heads * (turns + parts * (6 + cleared) + ceiling(dim, 8)));
    CHECK(counted.launches == 2);
  }
  with_depth<64, 128, 256>(dim, [&](auto rows) {
    using kernel = detail::measure_leverage<half, decltype(rows)::value>;
    traffic counted;
    counted.watch(work.inverse.data,
                  sizeof(bfloat16) * 3 * static_cast<std::size_t>(c.heads) *
                      static_cast<std::size_t>(detail::split_inverse::size(dim)));
    const index_t blocks = ceiling(n, kernel::slots), side = ceiling(dim, 64);
    launch(kernel{keys, kv.state, false, planned.data(), work.moments.mean, work.inverse,
                  work.leverage},
           {static_cast<unsigned>(c.heads), static_cast<unsigned>(blocks)}, launches);
    // Pieces of 64 × 64 below the diagonal and on it, in three parts; on it 10 of 16 tiles.
    const std::int64_t all = std::int64_t{c.heads} * blocks, pieces = all * side * (side + 1) / 2;
    CHECK(counted.of(0).loaded.bytes == pieces * 64 * 64 * 3 * 2);
    CHECK(32 * counted.of(0).loaded.sectors == counted.of(0).loaded.bytes);
    CHECK(counted.mmas ==
          all * (side * (side - 1) / 2 * 16 + side * 10) * (kernel::slots / 16) * 2 * 6);
    CHECK(counted.bank_conflicts == 0);
    CHECK(counted.barriers == pieces + all * (1 + cleared));
  });
  CHECK(memory.intact());
}

TEST_CASE("a place without a head measures no leverage: it reads nothing", "[active]") {
  device_cache<half> kv({.heads = 1, .capacity = 20, .dim = 64}, {20}, 3);
  device_buffer<index_t> list(1);
  *list.host() = -1;
  auto view = kv.view().with_active(list.data(), 1);
  view.length = nullptr;
  using kernel = detail::measure_leverage<half, 64>;
  launch(kernel{{view, {}, budget{.slots = 0}, nullptr}, kv.state, false, nullptr, nullptr, {}, {}},
         {1, 1}, order());
}

TEST_CASE("leverage multiplies a triangle of keys' products and one of the factor's inverse") {
  check_leverage({.heads = 2, .capacity = 600, .dim = 128});
  check_leverage({.heads = 2, .capacity = 100, .dim = 64});
  check_leverage({.heads = 1, .capacity = 70, .dim = 160});
  check_leverage({.heads = 1, .capacity = 40, .dim = 256});
}

}  // namespace leverage_traffic_emulator_test
}  // namespace kvmeld::cuda
